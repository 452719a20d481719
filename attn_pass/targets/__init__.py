"""The forms an attention can be given: one file a kernel, each with its conditions, reasons and emission."""

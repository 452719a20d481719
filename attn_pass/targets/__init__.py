"""The forms that an attention can take: one file per kernel, each with its conditions, reasons and emission."""

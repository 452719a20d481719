"""The forms that an attention can take on several kinds of device, and what they share: masks, operands, calls."""

"""Linear layers on CPUs, given to the CPU kernel or to oneDNN where these are faster than torch's call."""

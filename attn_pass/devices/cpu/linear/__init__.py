"""Linear layers on CPUs, given to oneDNN where it is faster than what torch's call for them takes."""

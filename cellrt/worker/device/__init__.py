"""Workers on GPUs, and the stand-in that plays one."""

"""Where the work of sites is executed: in this process, or in all processes of a launch."""

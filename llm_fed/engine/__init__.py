"""What the frozen base computes for the sites: the requests of a whole cohort, executed fused."""

"""The round loop, and what stands between it and the clients: schedule, uploads, privacy, progress."""

"""What a run leaves on the disk: its folder, its resumable state, its result."""

"""What training recipes share."""

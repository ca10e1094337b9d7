"""Import configs and command lines of torchtune."""

"""Import configs of axolotl."""

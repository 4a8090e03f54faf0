"""Generated files on the disk: the configs of a project, what they write, and whether it is still what they say."""

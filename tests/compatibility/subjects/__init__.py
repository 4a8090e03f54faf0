"""One file a subject: the columns of one section of the table."""

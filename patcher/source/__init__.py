"""Python source as data: read, analysed, edited and made, without importing what it belongs to."""

"""Python source as data: read, analyzed and edited without importing it."""

"""Hook functions, their groups, and what happens when one runs."""

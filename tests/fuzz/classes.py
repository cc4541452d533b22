"""All programs written by hand: one or more for each known way to a wrong number.

They are of the same form as the random ones, so they replay and shrink alike. The names begin with
the number of the class: 1 equal values taken for one value; 2 rows looked for in dim 0; 3 a layout
remembered by shape, and ties at size 1; 4 the order of parts; 5 gradients; 6 state.
"""

import classes_gradients
import classes_memory
import classes_rows
import classes_values
from directed import CLASSES

MODULES = (classes_values, classes_rows, classes_memory, classes_gradients)  # they fill CLASSES

__all__ = ["CLASSES"]

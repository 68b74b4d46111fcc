"""An op and a pass for treadle, from outside its tree."""

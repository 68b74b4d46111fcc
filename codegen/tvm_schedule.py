"""placeholder"""
def arrange(function):
    return function

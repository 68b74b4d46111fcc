// The packed product for one instruction set; its flags are in kernels/native.py.
#include "packed_linear.h"

void treadle::panels_avx512(const Product& at, int64_t first, int64_t last) { product(at, first, last); }

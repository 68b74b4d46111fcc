// What the units of packed_linear share: one product, and one function for each instruction set.
#pragma once

#include "abi.h"

namespace treadle {

// out [rows, n] = x [rows, k] @ weight.T. For bf16 x has k_padded columns: the caller fills up with zeros.
struct Product {
  int64_t dtype;     // F32 or BF16, of x, weight and out
  const void* x;
  int64_t x_stride;  // elements from row to row
  const void* weight;
  int64_t panel;     // elements of one panel of 16 columns
  void* out;         // dense
  int64_t rows;
  int64_t n;
  int64_t k_padded;
};

// Computes the panels [first, last) of the product. Threads share a product by panels.
typedef void (*Panels)(const Product&, int64_t first, int64_t last);

void panels_portable(const Product&, int64_t first, int64_t last);
void panels_avx2(const Product&, int64_t first, int64_t last);
void panels_avx512(const Product&, int64_t first, int64_t last);
void panels_avx512_bf16(const Product&, int64_t first, int64_t last);
void panels_amx(const Product&, int64_t first, int64_t last);  // bf16 only

}  // namespace treadle

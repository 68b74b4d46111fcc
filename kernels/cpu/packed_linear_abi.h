// What the units of packed_linear share: one product, and one function for each instruction set.
#pragma once

#include <stdlib.h>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "abi.h"

namespace treadle {

enum Weights : int64_t { AS_X = 0, INT8 = 1 };

// out [rows, n] = x [rows, k] @ weight.T. Where the weight comes in pairs x has k_padded columns: the caller fills up with zeros.
struct Product {
  int64_t dtype;     // F32 or BF16, of x and out
  int64_t weights;   // the element type of the weight: that of x, or int8
  const void* x;
  int64_t x_stride;  // elements from row to row
  const void* weight;
  int64_t first_panel;  // where `weight` begins
  const float* scale;   // [panels][groups][16], or null: what each sum over a group of k is multiplied by
  int64_t groups;
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

namespace {

// Memory of one thread that only grows.
struct Scratch {
  void* data = nullptr;
  int64_t bytes = 0;
  ~Scratch() { free(data); }
  void* of(int64_t wanted) {
    if (bytes < wanted) {
      free(data);
      data = aligned_alloc(64, (wanted + 63) / 64 * 64);
      bytes = data ? wanted : 0;
    }
    return data;
  }
};

#if defined(__AVX512BF16__)
// 32 values of int8 as bf16, in their order.
inline __m512bh wide_pairs(const int8_t* w) {
  const __m128i low = _mm_loadu_si128((const __m128i*)w), high = _mm_loadu_si128((const __m128i*)(w + 16));
  return _mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(high)), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(low)));
}
#endif

// int8 as bf16, which holds every one of them exactly.
inline void widen(const int8_t* from, int64_t count, uint16_t* to) {
  int64_t i = 0;
#if defined(__AVX512BF16__)
  for (; i + 32 <= count; i += 32) _mm512_storeu_si512(to + i, (__m512i)wide_pairs(from + i));
#endif
  for (; i < count; ++i) {
    const float value = (float)from[i];
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    to[i] = (uint16_t)(bits >> 16);
  }
}

// Calls `compute(product, from, to)` for panels in groups, with int8 weights of a group widened before: many rows then
// pay once for it. Every sum is the one that a kernel for int8 has, since no value changes. False: no memory.
template <typename Compute>
inline bool widened(const treadle::Product& at, int64_t first, int64_t last, Compute compute) {
  constexpr int64_t GROUP = 8;
  static thread_local Scratch scratch;
  uint16_t* wide = (uint16_t*)scratch.of(GROUP * at.panel * 2);
  if (!wide) return false;
  for (int64_t from = first; from < last; from += GROUP) {
    const int64_t to = from + GROUP < last ? from + GROUP : last;
    widen((const int8_t*)at.weight + (from - at.first_panel) * at.panel, (to - from) * at.panel, wide);
    treadle::Product group = at;
    group.weights = treadle::AS_X;
    group.weight = wide;
    group.first_panel = from;
    compute(group, from, to);
  }
  return true;
}

}  // namespace

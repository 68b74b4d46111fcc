// Products of activations with a packed weight, for one instruction set. Everything is in an anonymous namespace, as in
// vector.h. The layout of the weight, [N, K] before packing, is that of ir/packing.py:
//
//   f32    [ceil(N / 16)][K][16]          column n of the product stands in block n / 16, lane n % 16
//   bf16   [ceil(N / 16)][K' / 2][16][2]  K' is K rounded up to 32; a pair is two neighbouring k of one column
//
// A panel of 16 columns is contiguous, so one row of activations reads the weight as a few streams, and 32 k of a bf16
// panel are one AMX tile. Every sum runs over k in one fixed order whatever the number of rows: a row's result does not
// depend on the batch it is in, nor on the number of threads.
#pragma once

#include <string.h>

#include "packed_linear_abi.h"
#include "vector.h"

namespace {

constexpr int64_t COLUMNS = 16;                      // of a panel
constexpr int VECTORS = COLUMNS / LANES;             // of a panel's row
#if LANES == 16
constexpr int MAX_ROWS = 6;
constexpr int PANELS[MAX_ROWS + 1] = {0, 8, 8, 6, 6, 4, 4};  // so many panels at once: rows x panels fit the registers
#elif LANES == 8
constexpr int MAX_ROWS = 3;
constexpr int PANELS[MAX_ROWS + 1] = {0, 4, 3, 2};
#else
constexpr int MAX_ROWS = 3;
constexpr int PANELS[MAX_ROWS + 1] = {0, 2, 1, 1};
#endif

// Sums for R rows of x and P panels. `panel` is the distance between panels in elements of T.
template <typename T, int R, int P>
NOINLINE void tile(const T* x, int64_t x_stride, const T* w, int64_t panel, int64_t k_count, float* sums);

template <int R, int P>
struct Sums {
  vf at[R][P][VECTORS];
  INLINE void store_to(float* sums) const {
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p)
        for (int v = 0; v < VECTORS; ++v) store(sums + (r * P + p) * COLUMNS + v * LANES, at[r][p][v]);
  }
};

template <int R, int P>
INLINE void tile_f32(const float* x, int64_t x_stride, const float* w, int64_t panel, int64_t k_count, float* sums) {
  Sums<R, P> acc{};
  for (int64_t k = 0; k < k_count; ++k)
    for (int p = 0; p < P; ++p)
      for (int v = 0; v < VECTORS; ++v) {
        const vf weight = load(w + p * panel + k * COLUMNS + v * LANES);
        for (int r = 0; r < R; ++r) acc.at[r][p][v] = fma(splat(x[r * x_stride + k]), weight, acc.at[r][p][v]);
      }
  acc.store_to(sums);
}

// x is a row of pairs, padded with zero to an even count by the caller.
template <int R, int P>
INLINE void tile_bf16(const bf16* x, int64_t x_stride, const bf16* w, int64_t panel, int64_t k_count, float* sums) {
  Sums<R, P> acc{};
  for (int64_t k = 0; k < k_count; k += 2)
    for (int p = 0; p < P; ++p)
      for (int v = 0; v < VECTORS; ++v) {
        vu pairs;
        memcpy(&pairs, w + p * panel + (k * COLUMNS + v * LANES * 2), sizeof pairs);
#if defined(__AVX512BF16__)
        for (int r = 0; r < R; ++r) {
          int32_t pair;
          memcpy(&pair, x + r * x_stride + k, 4);
          acc.at[r][p][v] = (vf)_mm512_dpbf16_ps((__m512)acc.at[r][p][v], (__m512bh)_mm512_set1_epi32(pair), (__m512bh)pairs);
        }
#else
        const vf even = (vf)(pairs << 16), odd = (vf)(pairs & 0xffff0000u);
        for (int r = 0; r < R; ++r) {
          const vf first = fma(splat(to_float(x[r * x_stride + k])), even, acc.at[r][p][v]);
          acc.at[r][p][v] = fma(splat(to_float(x[r * x_stride + k + 1])), odd, first);
        }
#endif
      }
  acc.store_to(sums);
}

template <typename T, int R, int P>
NOINLINE void tile(const T* x, int64_t x_stride, const T* w, int64_t panel, int64_t k_count, float* sums) {
  if constexpr (sizeof(T) == 4)
    tile_f32<R, P>(x, x_stride, w, panel, k_count, sums);
  else
    tile_bf16<R, P>(x, x_stride, w, panel, k_count, sums);
}

template <typename T>
INLINE void write_row(const float* sums, int64_t columns, T* out) {
  for (int64_t c = 0; c < columns; ++c) from_float(sums[c], out + c);
}

// All columns of panels [first, last) for R rows.
template <typename T, int R>
void rows_of(const treadle::Product& at, const T* x, int64_t x_stride, int64_t row, int64_t first, int64_t last) {
  constexpr int P = PANELS[R];
  float sums[R * P * COLUMNS];
  const T* w = (const T*)at.weight;
  for (int64_t panel = first; panel < last;) {
    const int wide = last - panel >= P ? P : 1;
    if (wide == P)
      tile<T, R, P>(x, x_stride, w + panel * at.panel, at.panel, at.k_padded, sums);
    else
      tile<T, R, 1>(x, x_stride, w + panel * at.panel, at.panel, at.k_padded, sums);
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < wide; ++p) {
        const int64_t column = (panel + p) * COLUMNS;
        const int64_t columns = at.n - column < COLUMNS ? at.n - column : COLUMNS;
        write_row(sums + (r * wide + p) * COLUMNS, columns, (T*)at.out + (row + r) * at.n + column);
      }
    panel += wide;
  }
}

// Panels in small groups, all rows for each group: the group stays in the cache, the weight is read from memory once.
template <typename T>
void panels(const treadle::Product& at, const T* x, int64_t x_stride, int64_t first, int64_t last) {
  constexpr int64_t GROUP = 8;
  for (int64_t from = first; from < last; from += GROUP) {
    const int64_t to = from + GROUP < last ? from + GROUP : last;
    int64_t row = 0;
    for (; row + MAX_ROWS <= at.rows; row += MAX_ROWS) rows_of<T, MAX_ROWS>(at, x + row * x_stride, x_stride, row, from, to);
    const T* rest = x + row * x_stride;
    switch (at.rows - row) {
#if LANES == 16
      case 5: rows_of<T, 5>(at, rest, x_stride, row, from, to); break;
      case 4: rows_of<T, 4>(at, rest, x_stride, row, from, to); break;
      case 3: rows_of<T, 3>(at, rest, x_stride, row, from, to); break;
#endif
      case 2: rows_of<T, 2>(at, rest, x_stride, row, from, to); break;
      case 1: rows_of<T, 1>(at, rest, x_stride, row, from, to); break;
      default: break;
    }
  }
}

INLINE void product(const treadle::Product& at, int64_t first, int64_t last) {
  if (at.dtype == treadle::F32)
    panels(at, (const float*)at.x, at.x_stride, first, last);
  else
    panels(at, (const bf16*)at.x, at.x_stride, first, last);
}

}  // namespace

// Products of activations with a packed weight, for one instruction set. Everything is in an anonymous namespace, as in
// vector.h. The layout of the weight, [N, K] before packing, is that of ir/packing.py:
//
//   f32    [ceil(N / 16)][K][16]          column n of the product stands in block n / 16, lane n % 16
//   bf16   [ceil(N / 16)][K' / 2][16][2]  K' is K rounded up to 32; a pair is two neighbouring k of one column
//   int8   as bf16, whatever x is, with float32 scales [ceil(N / 16)][groups][16]
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

// Sums for R rows of x and P panels. `panel` is the distance between panels in elements of W.
template <typename T, typename W, int R, int P>
NOINLINE void tile(const T* x, int64_t x_stride, const W* w, int64_t panel, int64_t k_count, float* sums);

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
INLINE void tile_int8(const T* x, int64_t x_stride, const int8_t* w, int64_t panel, int64_t k_count, float* sums) {
  Sums<R, P> acc{};
  for (int64_t k = 0; k < k_count; k += 2)
    for (int p = 0; p < P; ++p)
      for (int v = 0; v < VECTORS; ++v) {
        const int8_t* at = w + p * panel + (k * COLUMNS + v * LANES * 2);
#if defined(__AVX512BF16__)
        if constexpr (sizeof(T) == 2) {
          const __m512bh pairs = wide_pairs(at);
          for (int r = 0; r < R; ++r) {
            int32_t pair;
            memcpy(&pair, x + r * x_stride + k, 4);
            acc.at[r][p][v] = (vf)_mm512_dpbf16_ps((__m512)acc.at[r][p][v], (__m512bh)_mm512_set1_epi32(pair), pairs);
          }
          continue;
        }
#endif
        const vu pairs = load_u16(at);
        const vf even = __builtin_convertvector((vi)(pairs << 24) >> 24, vf), odd = __builtin_convertvector((vi)(pairs << 16) >> 24, vf);
        for (int r = 0; r < R; ++r) {
          const vf first = fma(splat(to_float(x[r * x_stride + k])), even, acc.at[r][p][v]);
          acc.at[r][p][v] = fma(splat(to_float(x[r * x_stride + k + 1])), odd, first);
        }
      }
  acc.store_to(sums);
}

template <typename T, typename W, int R, int P>
NOINLINE void tile(const T* x, int64_t x_stride, const W* w, int64_t panel, int64_t k_count, float* sums) {
  if constexpr (sizeof(W) == 1)
    tile_int8<T, R, P>(x, x_stride, w, panel, k_count, sums);
  else if constexpr (sizeof(W) == 4)
    tile_f32<R, P>(x, x_stride, w, panel, k_count, sums);
  else
    tile_bf16<R, P>(x, x_stride, w, panel, k_count, sums);
}

// The sums over all of k, scaled: group by group where there are several.
template <typename T, typename W, int R, int P>
INLINE void scaled_tile(const treadle::Product& at, const T* x, int64_t x_stride, const W* w, int64_t panel, float* sums) {
  const int64_t size = at.k_padded / at.groups;
  tile<T, W, R, P>(x, x_stride, w, at.panel, size, sums);
  if (!at.scale) return;
  float more[R * P * COLUMNS];
  for (int64_t g = 0; g < at.groups; ++g) {
    if (g > 0) tile<T, W, R, P>(x + g * size, x_stride, w + g * size * COLUMNS, at.panel, size, more);
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p) {
        const float* scale = at.scale + ((panel + p) * at.groups + g) * COLUMNS;
        float* to = sums + (r * P + p) * COLUMNS;
        const float* from = more + (r * P + p) * COLUMNS;
        for (int c = 0; c < COLUMNS; ++c) to[c] = g > 0 ? to[c] + from[c] * scale[c] : to[c] * scale[c];
      }
  }
}

template <typename T>
INLINE void write_row(const float* sums, int64_t columns, T* out) {
  for (int64_t c = 0; c < columns; ++c) from_float(sums[c], out + c);
}

// All columns of panels [first, last) for R rows.
template <typename T, typename W, int R>
void rows_of(const treadle::Product& at, const T* x, int64_t x_stride, int64_t row, int64_t first, int64_t last) {
  constexpr int P = PANELS[R];
  float sums[R * P * COLUMNS];
  const W* w = (const W*)at.weight - at.first_panel * at.panel;
  for (int64_t panel = first; panel < last;) {
    const int wide = last - panel >= P ? P : 1;
    if (wide == P)
      scaled_tile<T, W, R, P>(at, x, x_stride, w + panel * at.panel, panel, sums);
    else
      scaled_tile<T, W, R, 1>(at, x, x_stride, w + panel * at.panel, panel, sums);
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
template <typename T, typename W>
void panels(const treadle::Product& at, const T* x, int64_t x_stride, int64_t first, int64_t last) {
  constexpr int64_t GROUP = 8;
  for (int64_t from = first; from < last; from += GROUP) {
    const int64_t to = from + GROUP < last ? from + GROUP : last;
    int64_t row = 0;
    for (; row + MAX_ROWS <= at.rows; row += MAX_ROWS) rows_of<T, W, MAX_ROWS>(at, x + row * x_stride, x_stride, row, from, to);
    const T* rest = x + row * x_stride;
    switch (at.rows - row) {
#if LANES == 16
      case 5: rows_of<T, W, 5>(at, rest, x_stride, row, from, to); break;
      case 4: rows_of<T, W, 4>(at, rest, x_stride, row, from, to); break;
      case 3: rows_of<T, W, 3>(at, rest, x_stride, row, from, to); break;
#endif
      case 2: rows_of<T, W, 2>(at, rest, x_stride, row, from, to); break;
      case 1: rows_of<T, W, 1>(at, rest, x_stride, row, from, to); break;
      default: break;
    }
  }
}

inline void product(const treadle::Product& at, int64_t first, int64_t last) {
  if (at.weights == treadle::INT8) {
    const auto wide = [](const treadle::Product& group, int64_t from, int64_t to) {
      panels<bf16, bf16>(group, (const bf16*)group.x, group.x_stride, from, to);
    };
    if (at.dtype == treadle::F32)
      panels<float, int8_t>(at, (const float*)at.x, at.x_stride, first, last);
    else if (at.groups > 1 || at.rows <= MAX_ROWS || !widened(at, first, last, wide))
      panels<bf16, int8_t>(at, (const bf16*)at.x, at.x_stride, first, last);
  } else if (at.dtype == treadle::F32)
    panels<float, float>(at, (const float*)at.x, at.x_stride, first, last);
  else
    panels<bf16, bf16>(at, (const bf16*)at.x, at.x_stride, first, last);
}

}  // namespace

// The packed product of bf16 on AMX tiles: 32 rows x 32 columns at a time, 32 k in one instruction.
#include <immintrin.h>
#include <string.h>

#include "packed_linear_abi.h"

namespace treadle {
namespace {

constexpr int64_t COLUMNS = 16, TILE_K = 32, TILE_ROWS = 16;
constexpr int64_t ROW_BLOCK = 256;  // rows whose activations stay in the second-level cache while panels pass by
constexpr int64_t TILE = TILE_K * COLUMNS;  // elements of one weight tile

struct __attribute__((packed)) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 are sums (first and second 16 rows x first and second panel), 4 and 5 activations, 6 and 7 weights.
void configure(int64_t first_rows, int64_t second_rows) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) config.bytes[t] = 64;
  const uint8_t top = first_rows, bottom = second_rows > 0 ? second_rows : 1;
  config.rows[0] = config.rows[1] = config.rows[4] = top;
  config.rows[2] = config.rows[3] = config.rows[5] = bottom;
  config.rows[6] = config.rows[7] = TILE_ROWS;
  _tile_loadconfig(&config);
}

// Fetches the tile that will be needed four steps later; hardware prefetch alone leaves half of the bandwidth.
inline void prefetch(const uint16_t* tile) {
  for (int line = 0; line < 16; ++line) _mm_prefetch((const char*)(tile + line * 32 + 8 * TILE), _MM_HINT_T0);
}

// FROM_MEMORY: the weight is read for the first time; later row blocks find it in a cache.
template <bool TWO_ROWS, bool TWO_PANELS, bool FROM_MEMORY>
void multiply(const uint16_t* x, int64_t x_stride, const uint16_t* w, int64_t panel, int64_t k_count, float* sums) {
  _tile_zero(0);
  if (TWO_PANELS) _tile_zero(1);
  if (TWO_ROWS) _tile_zero(2);
  if (TWO_ROWS && TWO_PANELS) _tile_zero(3);
  for (int64_t k = 0; k < k_count; k += TILE_K) {
    const uint16_t* tile = w + k * COLUMNS;
    _tile_loadd(4, x + k, x_stride * 2);
    if (TWO_ROWS) _tile_loadd(5, x + TILE_ROWS * x_stride + k, x_stride * 2);
    _tile_loadd(6, tile, 64);
    if (FROM_MEMORY) prefetch(tile);
    _tile_dpbf16ps(0, 4, 6);
    if (TWO_ROWS) _tile_dpbf16ps(2, 5, 6);
    if (TWO_PANELS) {
      _tile_loadd(7, tile + panel, 64);
      if (FROM_MEMORY) prefetch(tile + panel);
      _tile_dpbf16ps(1, 4, 7);
      if (TWO_ROWS) _tile_dpbf16ps(3, 5, 7);
    }
  }
  // sums [32][32]
  _tile_stored(0, sums, 128);
  if (TWO_PANELS) _tile_stored(1, sums + 16, 128);
  if (TWO_ROWS) _tile_stored(2, sums + 16 * 32, 128);
  if (TWO_ROWS && TWO_PANELS) _tile_stored(3, sums + 16 * 32 + 16, 128);
}

typedef void (*Multiply)(const uint16_t*, int64_t, const uint16_t*, int64_t, int64_t, float*);
constexpr Multiply KERNELS[2][2][2] = {
    {{multiply<false, false, false>, multiply<false, false, true>}, {multiply<false, true, false>, multiply<false, true, true>}},
    {{multiply<true, false, false>, multiply<true, false, true>}, {multiply<true, true, false>, multiply<true, true, true>}},
};

void write(const Product& at, const float* sums, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  const float* scale = at.scale ? at.scale + column : nullptr;
  uint16_t* out = (uint16_t*)at.out + row * at.n + column;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; c += 16) {
      const __mmask16 mask = columns - c >= 16 ? 0xffff : (1u << (columns - c)) - 1;
      __m512 sum = _mm512_loadu_ps(sums + r * 32 + c);
      if (scale) sum = _mm512_mul_ps(sum, _mm512_loadu_ps(scale + c));
      const __m256bh value = _mm512_cvtneps_pbh(sum);
      _mm256_mask_storeu_epi16(out + r * at.n + c, mask, (__m256i)value);
    }
}

void bf16_panels(const Product& at, int64_t first, int64_t last) {
  alignas(64) float sums[32 * 32];
  int64_t top = -1, bottom = -1;
  for (int64_t from = 0; from < at.rows; from += ROW_BLOCK) {
    const int64_t to = from + ROW_BLOCK < at.rows ? from + ROW_BLOCK : at.rows;
    for (int64_t panel = first; panel < last; panel += 2) {
      const bool two = panel + 1 < last;
      const uint16_t* w = (const uint16_t*)at.weight + (panel - at.first_panel) * at.panel;
      const int64_t column = panel * COLUMNS;
      const int64_t wide = two ? 2 * COLUMNS : COLUMNS, columns = at.n - column < wide ? at.n - column : wide;
      for (int64_t row = from; row < to; row += 2 * TILE_ROWS) {
        const int64_t rows = to - row < 2 * TILE_ROWS ? to - row : 2 * TILE_ROWS;
        const int64_t upper = rows < TILE_ROWS ? rows : TILE_ROWS, lower = rows - upper;
        if (upper != top || lower != bottom) configure(top = upper, bottom = lower);
        const uint16_t* x = (const uint16_t*)at.x + row * at.x_stride;
        const Multiply kernel = KERNELS[lower > 0][two][row == from];
        kernel(x, at.x_stride, w, at.panel, at.k_padded, sums);
        write(at, sums, row, rows, column, columns);
      }
    }
  }
  _tile_release();
}

}  // namespace

// Groups of scales do not fit what tiles sum up: the vector unit takes these.
void panels_amx(const Product& at, int64_t first, int64_t last) {
  if (at.weights == AS_X)
    bf16_panels(at, first, last);
  else if (at.groups > 1 || !widened(at, first, last, bf16_panels))
    panels_avx512_bf16(at, first, last);
}

}  // namespace treadle

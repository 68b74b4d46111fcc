// One vector vocabulary for every instruction set: LANES floats through GCC's vector extensions, intrinsics only
// where those cannot say it (fused multiply-add, half precision). Everything is in an anonymous namespace: a unit
// built for AVX-512 must not lend the linker an inline function that an older CPU would then run.
#pragma once

#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// TREADLE_WIDE: the AVX-512 shape of the code in plain vector extensions, to test it on a CPU without AVX-512.
#if defined(__AVX512F__) || defined(TREADLE_WIDE)
#define LANES 16
#define ROW_GROUP 4  // rows x 4 accumulators in registers: 16 of 32
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#define ROW_GROUP 3  // 12 of 16
#else
#define LANES 4
#define ROW_GROUP 3
#endif

namespace {

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));
typedef float vf4 __attribute__((vector_size(16)));

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

#define INLINE inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))  // a micro kernel has the registers to itself

INLINE vf splat(float x) { return x - vf{}; }
INLINE vf select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
INLINE vf maximum(vf a, vf b) { return select(a > b, a, b); }

INLINE vf load(const float* p) {
  vf x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

INLINE vu load_u16(const void* p) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
  vh x;
  __builtin_memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, vu);
#endif
}

INLINE vf load(const bf16* p) { return (vf)(load_u16(p) << 16); }

INLINE vf load(const f16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  // Exponent rebased by a multiplication, which also normalises subnormals; infinity and NaN get theirs set.
  const vu h = load_u16(p);
  const vf magnitude = (vf)((h & 0x7fff) << 13) * 0x1p112f;
  const vu special = (vu)((h & 0x7c00) == 0x7c00) & 0x7f800000;
  return (vf)((vu)magnitude | special | ((h & 0x8000) << 16));
#endif
}

INLINE void store(float* p, vf x) { __builtin_memcpy(p, &x, sizeof x); }

INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}
INLINE float to_float(f16 x) {
  uint16_t lanes[LANES] = {x.bits};
  return load((const f16*)lanes)[0];
}

INLINE void from_float(float x, float* p) { *p = x; }
INLINE void from_float(float x, bf16* p) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  p->bits = (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}
INLINE void from_float(float x, f16* p) {
#if defined(__F16C__)
  p->bits = (uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  const uint32_t sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
  uint32_t h;
  if (magnitude > 0x7f800000) {
    h = 0x7e00;  // NaN
  } else if (magnitude >= 0x477ff000) {
    h = 0x7c00;  // rounds to 65536 or more: infinity
  } else if (magnitude < 0x38800000) {
    float f;  // subnormal: the float adder rounds at the right bit
    __builtin_memcpy(&f, &magnitude, 4);
    f += 0.5f;
    __builtin_memcpy(&h, &f, 4);
    h -= 0x3f000000;
  } else {
    h = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  }
  p->bits = (uint16_t)(sign | h);
#endif
}

// Folds 16 or 8 lanes to 4, always upper half onto lower half.
INLINE vf4 fold(vf x) {
#if LANES == 16
  typedef float vf8 __attribute__((vector_size(32)));
  const vf8 h = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
#elif LANES == 8
  return __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
#else
  return x;
#endif
}

// Sums of four vectors at once; each sum adds its lanes in the same order, whichever of the four it is.
INLINE vf4 sum4(vf a, vf b, vf c, vf d) {
  const vf4 w = fold(a), x = fold(b), y = fold(c), z = fold(d);
  const vf4 wx = __builtin_shufflevector(w, x, 0, 4, 1, 5) + __builtin_shufflevector(w, x, 2, 6, 3, 7);
  const vf4 yz = __builtin_shufflevector(y, z, 0, 4, 1, 5) + __builtin_shufflevector(y, z, 2, 6, 3, 7);
  return __builtin_shufflevector(wx, yz, 0, 1, 4, 5) + __builtin_shufflevector(wx, yz, 2, 3, 6, 7);
}

INLINE float sum(vf x) {
  const vf4 h = fold(x);
  return (h[0] + h[2]) + (h[1] + h[3]);
}

INLINE float maximum(vf x) {
  float best = x[0];
  for (int i = 1; i < LANES; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

// e^x for x <= 0 within 2 ulp (Cephes expf); exactly 1 at 0 and 0 below -87.3, so that masked scores vanish.
INLINE vf exp(vf x) {
  const vf lowest = splat(-87.336544f), magic = splat(12582912.f);
  const vf y = select(x < lowest, lowest, x);
  const vf shifted = fma(y, splat(1.44269504f), magic);  // the low bits of `shifted` are the exponent
  const vf n = shifted - magic;
  const vf r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), y));
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.f;
  const vf result = (vf)((vi)p + ((vi)shifted << 23));
  return select(x < lowest, splat(0.f), result);
}

INLINE float exp(float x) { return exp(splat(x))[0]; }

// tanh through exp(-2|x|): absolute error below 1.2e-7.
INLINE vf tanh(vf x) {
  const vf sign = (vf)((vi)x & (int32_t)0x80000000);
  const vf magnitude = (vf)((vi)x & 0x7fffffff);
  const vf t = exp(magnitude * -2.f);
  return (vf)((vi)((1.f - t) / (1.f + t)) | (vi)sign);
}

}  // namespace

// What Python calls: the choice of instruction set at run time, the write of new keys and values, and scratch memory.
#include "abi.h"

#include <stdlib.h>
#include <string.h>

namespace treadle {
namespace {

#if defined(__x86_64__) && !defined(TREADLE_PORTABLE_ONLY)
Isa best_isa() {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return avx512 ? AVX512 : avx2 ? AVX2 : PORTABLE;
}

Attention kernel_for(Isa isa) {
  return isa == AVX512 ? attention_avx512 : isa == AVX2 ? attention_avx2 : attention_portable;
}
#else
Isa best_isa() { return PORTABLE; }
Attention kernel_for(Isa) { return attention_portable; }
#endif

struct ThreadBuffers {
  void* data[NUM_BUFFERS] = {};
  int64_t bytes[NUM_BUFFERS] = {};
  ~ThreadBuffers() {
    for (void* p : data) free(p);
  }
};

void* grow_buffer(Buffer which, int64_t bytes) {
  static thread_local ThreadBuffers mine;
  if (mine.bytes[which] < bytes) {
    free(mine.data[which]);
    mine.data[which] = aligned_alloc(64, (bytes + 63) / 64 * 64);
    mine.bytes[which] = mine.data[which] ? bytes : 0;
  }
  return mine.data[which];
}

constexpr int64_t COPY_BYTES_PER_THREAD = 128 * 1024;

}  // namespace

TREADLE_EXPORT int64_t treadle_abi_version() { return TREADLE_ABI_VERSION; }

TREADLE_EXPORT int64_t treadle_best_isa() { return best_isa(); }

TREADLE_EXPORT int64_t treadle_paged_attention(const Layer* layer, const Batch* batch, const Cache* cache,
                                               void* q, int64_t q_token_stride, int64_t q_head_stride,
                                               void* out, int64_t out_token_stride, int64_t out_head_stride) {
  static const Isa best = best_isa();
  const Isa isa = layer->isa == AUTO ? best : (Isa)layer->isa;
  if (isa > best) return BAD_ISA;
  const Rows q_rows{q, q_token_stride, q_head_stride}, out_rows{out, out_token_stride, out_head_stride};
  return kernel_for(isa)(*layer, *batch, *cache, q_rows, out_rows, grow_buffer);
}

// Copies row t of k and v to slot_mapping[t] = block * block_size + offset; negative slots are left out.
TREADLE_EXPORT int64_t treadle_write_kv(const Layer* layer, const Cache* cache, const int64_t* slot_mapping,
                                        int64_t num_slots, const void* k, int64_t k_token_stride,
                                        int64_t k_head_stride, const void* v, int64_t v_token_stride,
                                        int64_t v_head_stride, int64_t num_threads) {
  const int64_t element = layer->dtype == F32 ? 4 : 2, row = layer->head_size * element;
  const int64_t last_slot = cache->num_blocks * cache->block_size;
  for (int64_t t = 0; t < num_slots; ++t)
    if (slot_mapping[t] >= last_slot) return BAD_SLOT;
  const int64_t wanted = num_slots * layer->num_kv_heads * 2 * row / COPY_BYTES_PER_THREAD;
  const int64_t threads = wanted < 1 ? 1 : wanted < num_threads ? wanted : num_threads;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < num_slots; ++t) {
    const int64_t slot = slot_mapping[t];
    if (slot < 0) continue;
    char* page = (char*)cache->data + (slot / cache->block_size * cache->block_stride +
                                       slot % cache->block_size * cache->token_stride) * element;
    for (int64_t h = 0; h < layer->num_kv_heads; ++h) {
      char* to = page + h * cache->head_stride * element;
      memcpy(to, (const char*)k + (t * k_token_stride + h * k_head_stride) * element, row);
      memcpy(to + row, (const char*)v + (t * v_token_stride + h * v_head_stride) * element, row);
    }
  }
  return OK;
}

}  // namespace treadle

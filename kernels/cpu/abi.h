// The C interface between Python and the kernels: plain structs, raw pointers, strides in elements.
// kernels/attention/cpu.py mirrors these structs field by field; change TREADLE_ABI_VERSION with either.
#pragma once

#include <stdint.h>

#define TREADLE_ABI_VERSION 1
#define TREADLE_EXPORT extern "C" __attribute__((visibility("default")))

namespace treadle {

enum DType : int64_t { F32 = 0, BF16 = 1, F16 = 2 };
enum Isa : int64_t { AUTO = 0, PORTABLE = 1, AVX2 = 2, AVX512 = 3 };

// What a call returns: OK, or which argument breaks its contract. Nothing out of bounds is ever touched.
enum Status : int64_t { OK = 0, BAD_SLOT = 1, BAD_BLOCK = 2, BAD_LENGTH = 3, NO_MEMORY = 4, BAD_ISA = 5 };

// Constants of one attention layer.
struct Layer {
  int64_t dtype;         // of q, cache and out
  int64_t num_heads;     // a multiple of num_kv_heads
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t window;        // visible tokens, the token itself included; 0: all
  int64_t isa;           // AUTO, or one level for tests
  const float* sinks;    // [num_heads] logits, or null
  float scale;
  float softcap;         // 0: none
};

// The batch of one step; filled once, used by every layer.
struct Batch {
  const int32_t* query_start_loc;  // [num_requests + 1]
  const int32_t* seq_lens;         // [num_requests]
  const int32_t* block_table;      // [num_requests, max_blocks], rows block_table_stride apart
  int64_t block_table_stride;
  int64_t max_blocks;
  int64_t num_requests;
  int64_t num_tokens;
  int64_t causal;
  int64_t num_threads;
};

// One layer's pages: [num_blocks, num_kv_heads, block_size, 2 * head_size], keys before values, last dimension dense.
struct Cache {
  void* data;
  int64_t num_blocks;
  int64_t block_size;
  int64_t block_stride;
  int64_t head_stride;
  int64_t token_stride;
};

// Rows of activations: element (token, head, d) stands at token * token_stride + head * head_stride + d.
struct Rows {
  void* data;
  int64_t token_stride;
  int64_t head_stride;
};

// Memory that lives as long as the calling thread and only grows; null when there is none to be had.
// A kernel owns its thread's two buffers until it returns.
enum Buffer { PLAN = 0, WORK = 1, NUM_BUFFERS = 2 };
typedef void* (*GrowBuffer)(Buffer which, int64_t bytes);

typedef int64_t (*Attention)(const Layer&, const Batch&, const Cache&, const Rows& q, const Rows& out, GrowBuffer);

int64_t attention_portable(const Layer&, const Batch&, const Cache&, const Rows&, const Rows&, GrowBuffer);
int64_t attention_avx2(const Layer&, const Batch&, const Cache&, const Rows&, const Rows&, GrowBuffer);
int64_t attention_avx512(const Layer&, const Batch&, const Cache&, const Rows&, const Rows&, GrowBuffer);

}  // namespace treadle

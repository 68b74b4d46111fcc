// The paged attention kernel for one instruction set; its flags are in kernels/native.py.
#include "paged_attention.h"

int64_t treadle::attention_portable(const Layer& layer, const Batch& batch, const Cache& cache, const Rows& q,
                                const Rows& out, GrowBuffer grow) {
  return attention(layer, batch, cache, q, out, grow);
}

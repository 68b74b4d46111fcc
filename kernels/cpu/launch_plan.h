// What a launch plan is made of. kernels/launch_plan.py mirrors the structs field by field; change TREADLE_ABI_VERSION with either.
#pragma once

#include <stddef.h>

#include "abi.h"

namespace treadle {

typedef void* Tensor;  // torch's AtenTensorHandle

constexpr int64_t MAX_OUTPUTS = 16, MAX_DIM = 8;

enum PlanStatus : int64_t {
  PLAN_OK = 0,
  PLAN_NO_RANGE = 1,
  PLAN_NO_MEMORY = 2,
  PLAN_PIECE_FAILED = 3,
  PLAN_BAD_TENSOR = 4,
  PLAN_BAD_ROW = 5,
  PLAN_ATTENTION_FAILED = 100,  // plus the status of abi.h
};

// Functions of torch's stable C shim (aoti_torch_*), by address. Each returns 0 on success.
struct TorchTable {
  int32_t (*new_handle)(Tensor, Tensor*);
  int32_t (*delete_handle)(Tensor);
  int32_t (*get_data)(Tensor, void**);
  int32_t (*get_dim)(Tensor, int64_t*);
  int32_t (*get_sizes)(Tensor, int64_t**);
  int32_t (*get_strides)(Tensor, int64_t**);
  int32_t (*get_dtype)(Tensor, int32_t*);
  int32_t (*empty)(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device_type,
                   int32_t device_index, Tensor*);
};

// AOTInductorModelContainerRunSingleThreaded: takes over the inputs' handles, gives away the outputs'.
typedef int32_t (*RunPiece)(void* container, Tensor* inputs, size_t num_inputs, Tensor* outputs, size_t num_outputs,
                            void* stream, void* proxy_executor);

typedef int64_t (*Attend)(const Layer*, const Batch*, const Cache*, void* q, int64_t, int64_t, void* out, int64_t,
                          int64_t);
typedef int64_t (*WriteKV)(const Layer*, const Cache*, const int64_t* slots, int64_t num_slots, const void* k, int64_t,
                           int64_t, const void* v, int64_t, int64_t, int64_t num_threads);

// One layer's attention. The structs behind the pointers are refilled each step and never move.
struct BoundAttention {
  Attend attend;
  WriteKV write;
  const Layer* layer;
  const Batch* batch;
  const Cache* cache;
  const int64_t* slot_mapping;
  const int64_t* num_tokens;  // of the step, without padding
  int64_t num_threads;
  int64_t element;  // bytes of one element
};

}  // namespace treadle

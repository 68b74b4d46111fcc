// One step of a model without an interpreter: compiled pieces and attention calls with everything bound but the shape.
//
// The plan is a list of steps over numbered values (tensor handles of torch's C shim). Weights, caches and the batch's
// metadata are bound once; values are owned by the plan from the step that makes them to the last one that reads them.
// Functions of torch and of the attention library arrive as addresses, so this file needs none of their headers.
#include "launch_plan.h"

#include <string.h>
#include <time.h>

#include <new>
#include <vector>

namespace treadle {
namespace {

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

enum Kind { PIECE, ATTENTION, SELECT_ROWS };

struct Range {
  int64_t start, end;  // token counts, both included
  void* container;
  RunPiece run;
};

struct Step {
  Kind kind;
  std::vector<int64_t> inputs, outputs, dead;  // places
  std::vector<Tensor> weights;
  std::vector<Range> ranges;
  int64_t from_argument, from_axis;  // where a piece's token count stands; -1: it has one artifact for all
  BoundAttention attention;
};

struct Plan {
  TorchTable torch;
  std::vector<Tensor> values;
  std::vector<char> bound;  // inputs of the plan: owned by the caller
  std::vector<Step> steps;
  std::vector<Tensor> scratch;
  int64_t piece_ns = 0, attention_ns = 0;
};

const Range* find_range(const std::vector<Range>& ranges, int64_t num_tokens) {
  for (const Range& range : ranges)
    if (range.start <= num_tokens && num_tokens <= range.end) return &range;
  return nullptr;
}

// Calls a piece on handles of its own, which it takes over.
int64_t run_piece(Plan& plan, Step& step) {
  std::vector<Tensor>& arguments = plan.scratch;
  arguments.clear();
  for (const int64_t place : step.inputs) arguments.push_back(plan.values[place]);
  arguments.insert(arguments.end(), step.weights.begin(), step.weights.end());
  const Range* fit = &step.ranges[0];
  if (step.from_argument >= 0) {
    int64_t* sizes = nullptr;
    if (plan.torch.get_sizes(arguments[step.from_argument], &sizes) != 0) return PLAN_BAD_TENSOR;
    fit = find_range(step.ranges, sizes[step.from_axis]);
    if (fit == nullptr) return PLAN_NO_RANGE;
  }
  size_t made = 0;
  for (; made < arguments.size(); ++made)
    if (plan.torch.new_handle(arguments[made], &arguments[made]) != 0) break;
  if (made < arguments.size()) {
    while (made > 0) plan.torch.delete_handle(arguments[--made]);
    return PLAN_NO_MEMORY;
  }
  Tensor outputs[MAX_OUTPUTS] = {};
  const int64_t begin = now();
  const int32_t failed =
      fit->run(fit->container, arguments.data(), arguments.size(), outputs, step.outputs.size(), nullptr, nullptr);
  plan.piece_ns += now() - begin;
  if (failed != 0) return PLAN_PIECE_FAILED;
  for (size_t i = 0; i < step.outputs.size(); ++i) plan.values[step.outputs[i]] = outputs[i];
  return PLAN_OK;
}

// A dense tensor like `like` but with `sizes`.
Tensor empty_like(const Plan& plan, Tensor like, int64_t dim, const int64_t* sizes) {
  int64_t strides[MAX_DIM];
  int64_t step = 1;
  for (int64_t d = dim - 1; d >= 0; --d) {
    strides[d] = step;
    step *= sizes[d] > 1 ? sizes[d] : 1;
  }
  int32_t dtype = 0;
  Tensor out = nullptr;
  if (plan.torch.get_dtype(like, &dtype) != 0) return nullptr;
  if (plan.torch.empty(dim, sizes, strides, dtype, 0, 0, &out) != 0) return nullptr;
  return out;
}

int64_t run_attention(Plan& plan, Step& step) {
  const BoundAttention& at = step.attention;
  void* data[3];
  int64_t *sizes[3], *strides[3];
  for (int i = 0; i < 3; ++i) {
    const Tensor value = plan.values[step.inputs[i]];
    if (plan.torch.get_data(value, &data[i]) != 0 || plan.torch.get_sizes(value, &sizes[i]) != 0 ||
        plan.torch.get_strides(value, &strides[i]) != 0 || strides[i][2] != 1)
      return PLAN_BAD_TENSOR;
  }
  const int64_t out_sizes[3] = {sizes[0][0], sizes[0][1], sizes[2][2]};
  const Tensor out = empty_like(plan, plan.values[step.inputs[0]], 3, out_sizes);
  if (out == nullptr) return PLAN_NO_MEMORY;
  plan.values[step.outputs[0]] = out;
  void* out_data = nullptr;
  if (plan.torch.get_data(out, &out_data) != 0) return PLAN_BAD_TENSOR;
  const int64_t used = *at.num_tokens, all = out_sizes[0], row = out_sizes[1] * out_sizes[2];
  if (all > used) memset((char*)out_data + used * row * at.element, 0, (all - used) * row * at.element);
  const int64_t begin = now();
  int64_t status = at.write(at.layer, at.cache, at.slot_mapping, used, data[1], strides[1][0], strides[1][1], data[2],
                            strides[2][0], strides[2][1], at.num_threads);
  if (status == 0)
    status = at.attend(at.layer, at.batch, at.cache, data[0], strides[0][0], strides[0][1], out_data, row, out_sizes[2]);
  plan.attention_ns += now() - begin;
  return status == 0 ? PLAN_OK : PLAN_ATTENTION_FAILED + status;
}

// out[i] = x[rows[i]] for a dense x [T, ...] and i64 rows [S].
int64_t run_select(Plan& plan, Step& step) {
  const Tensor x = plan.values[step.inputs[0]], rows = plan.values[step.inputs[1]];
  int64_t dim = 0, *sizes, *strides, *row_sizes, *row_strides;
  void *from, *to, *index;
  if (plan.torch.get_dim(x, &dim) != 0 || dim < 1 || dim > MAX_DIM || plan.torch.get_sizes(x, &sizes) != 0 ||
      plan.torch.get_strides(x, &strides) != 0 || plan.torch.get_sizes(rows, &row_sizes) != 0 ||
      plan.torch.get_strides(rows, &row_strides) != 0 || plan.torch.get_data(x, &from) != 0 ||
      plan.torch.get_data(rows, &index) != 0)
    return PLAN_BAD_TENSOR;
  int64_t wanted[MAX_DIM], row = 1;
  wanted[0] = row_sizes[0];
  for (int64_t d = dim - 1; d >= 1; --d) {
    if (strides[d] != row && sizes[d] > 1) return PLAN_BAD_TENSOR;
    wanted[d] = sizes[d];
    row *= sizes[d];
  }
  const Tensor out = empty_like(plan, x, dim, wanted);
  if (out == nullptr) return PLAN_NO_MEMORY;
  plan.values[step.outputs[0]] = out;
  if (plan.torch.get_data(out, &to) != 0) return PLAN_BAD_TENSOR;
  const int64_t element = step.attention.element;
  for (int64_t i = 0; i < wanted[0]; ++i) {
    const int64_t t = ((const int64_t*)index)[i * row_strides[0]];
    if (t < 0 || t >= sizes[0]) return PLAN_BAD_ROW;
    memcpy((char*)to + i * row * element, (const char*)from + t * strides[0] * element, row * element);
  }
  return PLAN_OK;
}

void release(Plan& plan, int64_t place) {
  if (plan.values[place] != nullptr && !plan.bound[place]) plan.torch.delete_handle(plan.values[place]);
  plan.values[place] = nullptr;
  plan.bound[place] = 0;
}

std::vector<int64_t> listed(const int64_t* places, int64_t count) { return {places, places + count}; }

}  // namespace

TREADLE_EXPORT int64_t treadle_abi_version() { return TREADLE_ABI_VERSION; }

TREADLE_EXPORT Plan* treadle_plan_new(const TorchTable* torch, int64_t num_values) {
  Plan* plan = new (std::nothrow) Plan();
  if (plan == nullptr) return nullptr;
  plan->torch = *torch;
  plan->values.assign(num_values, nullptr);
  plan->bound.assign(num_values, 0);
  return plan;
}

TREADLE_EXPORT void treadle_plan_delete(Plan* plan) {
  for (size_t place = 0; place < plan->values.size(); ++place) release(*plan, place);
  for (const Step& step : plan->steps)
    for (const Tensor weight : step.weights) plan->torch.delete_handle(weight);
  delete plan;
}

// Appends a compiled piece; the plan takes over the weights' handles. The size of argument from_argument along from_axis
// chooses the artifact. Returns the step's number, -1 for too many outputs.
TREADLE_EXPORT int64_t treadle_plan_add_piece(Plan* plan, const int64_t* inputs, int64_t num_inputs,
                                              const int64_t* outputs, int64_t num_outputs, const Tensor* weights,
                                              int64_t num_weights, int64_t from_argument, int64_t from_axis) {
  if (num_outputs > MAX_OUTPUTS) return -1;
  Step step{};
  step.kind = PIECE;
  step.inputs = listed(inputs, num_inputs);
  step.outputs = listed(outputs, num_outputs);
  step.weights.assign(weights, weights + num_weights);
  step.from_argument = from_argument;
  step.from_axis = from_axis;
  plan->steps.push_back(step);
  return plan->steps.size() - 1;
}

// Adds an artifact of the last piece, for start to end tokens, both included. The first that holds the count is run.
TREADLE_EXPORT void treadle_plan_add_range(Plan* plan, int64_t start, int64_t end, void* container, RunPiece run) {
  plan->steps.back().ranges.push_back({start, end, container, run});
}

TREADLE_EXPORT int64_t treadle_plan_add_attention(Plan* plan, const int64_t* qkv, int64_t output,
                                                  const BoundAttention* attention) {
  Step step{};
  step.kind = ATTENTION;
  step.inputs = listed(qkv, 3);
  step.outputs = {output};
  step.attention = *attention;
  plan->steps.push_back(step);
  return plan->steps.size() - 1;
}

TREADLE_EXPORT int64_t treadle_plan_add_select(Plan* plan, int64_t x, int64_t rows, int64_t output, int64_t element) {
  Step step{};
  step.kind = SELECT_ROWS;
  step.inputs = {x, rows};
  step.outputs = {output};
  step.attention.element = element;
  plan->steps.push_back(step);
  return plan->steps.size() - 1;
}

// Says which places nobody reads after the last step that was added.
TREADLE_EXPORT void treadle_plan_add_dead(Plan* plan, const int64_t* places, int64_t count) {
  plan->steps.back().dead = listed(places, count);
}

// Sets a value that belongs to the caller and outlives the steps that read it.
TREADLE_EXPORT void treadle_plan_set(Plan* plan, int64_t place, Tensor value) {
  release(*plan, place);
  plan->values[place] = value;
  plan->bound[place] = 1;
}

// A new handle of a value; the caller owns it. Null if there is none.
TREADLE_EXPORT Tensor treadle_plan_get(Plan* plan, int64_t place) {
  Tensor out = nullptr;
  if (plan->values[place] == nullptr || plan->torch.new_handle(plan->values[place], &out) != 0) return nullptr;
  return out;
}

TREADLE_EXPORT void treadle_plan_release(Plan* plan, int64_t place) { release(*plan, place); }

// Runs steps first to last - 1. Returns OK, or the status of the step whose number is written to failed_step.
TREADLE_EXPORT int64_t treadle_plan_run(Plan* plan, int64_t first, int64_t last, int64_t* failed_step) {
  for (int64_t i = first; i < last; ++i) {
    Step& step = plan->steps[i];
    for (const int64_t place : step.outputs) release(*plan, place);
    const int64_t status = step.kind == PIECE       ? run_piece(*plan, step)
                           : step.kind == ATTENTION ? run_attention(*plan, step)
                                                    : run_select(*plan, step);
    if (status != PLAN_OK) {
      *failed_step = i;
      return status;
    }
    for (const int64_t place : step.dead) release(*plan, place);
  }
  return PLAN_OK;
}

// Nanoseconds inside pieces and inside attention since the last call.
TREADLE_EXPORT void treadle_plan_times(Plan* plan, int64_t* piece_ns, int64_t* attention_ns) {
  *piece_ns = plan->piece_ns;
  *attention_ns = plan->attention_ns;
  plan->piece_ns = plan->attention_ns = 0;
}

}  // namespace treadle

// The packed product as compiled pieces call it (torch's C shim, no header of torch), and as tests call it.
#include <dlfcn.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "packed_linear_abi.h"

namespace treadle {
namespace {

enum Path : int64_t { PATH_PORTABLE = 1, PATH_AVX2 = 2, PATH_AVX512 = 3, PATH_AVX512_BF16 = 4, PATH_AMX = 5 };

#if defined(__x86_64__) && !defined(TREADLE_PORTABLE_ONLY)
// The kernel hands out tile registers on request only.
bool amx_allowed() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tiles = (d >> 24 & 1) && (d >> 22 & 1);  // AMX-TILE, AMX-BF16
  return tiles && syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
}

Path best_path() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
    return PATH_PORTABLE;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512dq"))
    return PATH_AVX2;
  if (!__builtin_cpu_supports("avx512bf16")) return PATH_AVX512;
  return amx_allowed() ? PATH_AMX : PATH_AVX512_BF16;
}

Panels panels_for(Path path, int64_t dtype) {
  if (path == PATH_AMX && dtype == BF16) return panels_amx;
  if (path >= PATH_AVX512_BF16) return panels_avx512_bf16;
  return path == PATH_AVX512 ? panels_avx512 : path == PATH_AVX2 ? panels_avx2 : panels_portable;
}
#else
Path best_path() { return PATH_PORTABLE; }
Panels panels_for(Path, int64_t) { return panels_portable; }
#endif

Path the_best() {
  static const Path best = best_path();
  return best;
}

// A copy of x with rows filled up to k_padded.
void* padded(const Product& at, int64_t k) {
  static thread_local Scratch scratch;
  const int64_t size = at.dtype == F32 ? 4 : 2;
  char* copy = (char*)scratch.of(at.rows * at.k_padded * size);
  if (!copy) return nullptr;
  for (int64_t r = 0; r < at.rows; ++r) {
    char* row = copy + r * at.k_padded * size;
    memcpy(row, (const char*)at.x + r * at.x_stride * size, k * size);
    memset(row + k * size, 0, (at.k_padded - k) * size);
  }
  return copy;
}

constexpr int64_t OPERATIONS_PER_THREAD = 64 * 1024;  // below, a second thread costs more than it saves

int64_t run(Product at, int64_t k, Path path) {
  if (at.rows == 0 || at.n == 0) return OK;
  at.k_padded = at.dtype == BF16 || at.weights == INT8 ? (k + 31) / 32 * 32 : k;
  if (at.groups > 1 && (at.k_padded != k || k % at.groups || k / at.groups % 2)) return BAD_LENGTH;
  at.panel = at.k_padded * 16;
  if (at.k_padded != k) {
    at.x = padded(at, k);
    if (!at.x) return NO_MEMORY;
    at.x_stride = at.k_padded;
  }
  const Panels compute = panels_for(path, at.dtype);
  const int64_t count = (at.n + 15) / 16;
  const int64_t wanted = at.rows * at.n * k / OPERATIONS_PER_THREAD;
  const int64_t most = omp_in_parallel() ? 1 : omp_get_max_threads();
  const int64_t threads = wanted < 1 ? 1 : wanted < most ? wanted : most;
  if (threads == 1) {
    compute(at, 0, count);
    return OK;
  }
#pragma omp parallel num_threads(threads)
  {
    const int64_t pairs = (count + 1) / 2, me = omp_get_thread_num(), all = omp_get_num_threads();
    const int64_t first = pairs * me / all * 2, last = pairs * (me + 1) / all * 2;
    compute(at, first, last < count ? last : count);
  }
  return OK;
}

typedef void* Tensor;  // torch's AtenTensorHandle

// Functions of the libtorch that is in the process already.
struct Torch {
  int32_t (*get_data)(Tensor, void**);
  int32_t (*get_dim)(Tensor, int64_t*);
  int32_t (*get_sizes)(Tensor, int64_t**);
  int32_t (*get_strides)(Tensor, int64_t**);
  int32_t (*get_dtype)(Tensor, int32_t*);
  int32_t (*empty)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Tensor*);
  int32_t float32, bfloat16, int8;
  bool complete;

  Torch() {
    void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    const auto find = [torch](const char* name) { return torch ? dlsym(torch, name) : nullptr; };
    get_data = (decltype(get_data))find("aoti_torch_get_data_ptr");
    get_dim = (decltype(get_dim))find("aoti_torch_get_dim");
    get_sizes = (decltype(get_sizes))find("aoti_torch_get_sizes");
    get_strides = (decltype(get_strides))find("aoti_torch_get_strides");
    get_dtype = (decltype(get_dtype))find("aoti_torch_get_dtype");
    empty = (decltype(empty))find("aoti_torch_empty_strided");
    const auto f32 = (int32_t(*)())find("aoti_torch_dtype_float32"), b16 = (int32_t(*)())find("aoti_torch_dtype_bfloat16");
    const auto i8 = (int32_t(*)())find("aoti_torch_dtype_int8");
    complete = get_data && get_dim && get_sizes && get_strides && get_dtype && empty && f32 && b16 && i8;
    int8 = i8 ? i8() : -1;
    float32 = f32 ? f32() : -1;
    bfloat16 = b16 ? b16() : -1;
  }
};

}  // namespace

TREADLE_EXPORT int64_t treadle_abi_version() { return TREADLE_ABI_VERSION; }

TREADLE_EXPORT int64_t treadle_best_path() { return the_best(); }

// For tests: path 0 is the best one.
TREADLE_EXPORT int64_t treadle_packed_linear(int64_t dtype, const void* x, int64_t x_stride, const void* weight, void* out,
                                             int64_t rows, int64_t n, int64_t k, int64_t path) {
  if (path > the_best()) return BAD_ISA;
  const Product at{dtype, AS_X, x, x_stride, weight, 0, nullptr, 1, 0, out, rows, n, 0};
  return run(at, k, path == 0 ? the_best() : (Path)path);
}

// The same with int8 weights and scales [panels][groups][16].
TREADLE_EXPORT int64_t treadle_packed_int8_linear(int64_t dtype, const void* x, int64_t x_stride, const void* weight,
                                                  const float* scale, int64_t groups, void* out, int64_t rows, int64_t n,
                                                  int64_t k, int64_t path) {
  if (path > the_best()) return BAD_ISA;
  const Product at{dtype, INT8, x, x_stride, weight, 0, scale, groups, 0, out, rows, n, 0};
  return run(at, k, path == 0 ? the_best() : (Path)path);
}

// A product of tensors. `scale` is null where the weight is of x's own type. Returns 0, or 1 for what it cannot take.
static int32_t product_of(Tensor x, Tensor weight, Tensor scale, int64_t n, Tensor* result) {
  static const Torch torch;
  if (!torch.complete) return 1;
  int64_t dim, *sizes, *strides, *scale_sizes;
  int32_t dtype, weight_dtype, scale_dtype;
  void *data, *packed, *out, *scales = nullptr;
  if (torch.get_dim(x, &dim) || dim != 2 || torch.get_sizes(x, &sizes) || torch.get_strides(x, &strides) ||
      torch.get_dtype(x, &dtype) || torch.get_dtype(weight, &weight_dtype) || torch.get_data(x, &data) ||
      torch.get_data(weight, &packed) || (strides[1] != 1 && sizes[1] != 1) ||
      (dtype != torch.float32 && dtype != torch.bfloat16) || weight_dtype != (scale ? torch.int8 : dtype))
    return 1;
  int64_t groups = 1;
  if (scale) {
    if (torch.get_dim(scale, &dim) || dim != 3 || torch.get_sizes(scale, &scale_sizes) || torch.get_data(scale, &scales) ||
        torch.get_dtype(scale, &scale_dtype) || scale_dtype != torch.float32)
      return 1;
    groups = scale_sizes[1];
  }
  const int64_t shape[2] = {sizes[0], n}, dense[2] = {n, 1};
  if (torch.empty(2, shape, dense, dtype, 0, 0, result) || torch.get_data(*result, &out)) return 1;
  const Product at{dtype == torch.float32 ? F32 : BF16, scale ? INT8 : AS_X, data, strides[0], packed, 0, (const float*)scales,
                   groups, 0, out, sizes[0], n, 0};
  return run(at, sizes[1], the_best()) == OK ? 0 : 1;
}

// The op treadle::packed_linear_v1(x [T, K], weight, n) -> [T, n].
TREADLE_EXPORT int32_t aoti_torch_cpu_packed_linear_v1(Tensor x, Tensor weight, int64_t n, Tensor* result) {
  return product_of(x, weight, nullptr, n, result);
}

// The op treadle::packed_int8_linear_v1(x [T, K], weight, scale, n) -> [T, n].
TREADLE_EXPORT int32_t aoti_torch_cpu_packed_int8_linear_v1(Tensor x, Tensor weight, Tensor scale, int64_t n, Tensor* result) {
  return product_of(x, weight, scale, n, result);
}

}  // namespace treadle

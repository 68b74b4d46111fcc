// Attention over paged keys and values, for prefill chunks and decode in one call. Built once per instruction set.
//
// A row is one (token, query head). Whatever the batch, a row is computed by the same operations in the same order:
//   score      partial sums over d in LANES lanes, folded by sum4; then scale, soft cap, mask
//   tile       TILE keys at absolute positions: online softmax step, then values added one key after another
//   chunk      CHUNK keys at absolute positions: each starts from nothing, and chunks are merged left to right
// Masked keys weigh exactly 0 and an untouched state scales by exactly 1, so which rows share a tile, how many threads
// run and whether chunks are computed apart change no bit of a finite result. Only the instruction set does.
//
//   KV positions   |<----------- chunk 0 ----------->|<----------- chunk 1 ----------->|   seq_len
//   tiles          | t0 | t1 | ...              | t7 | t8 | ...                        |      v
//                                                          keys at or beyond seq_len are never loaded
#pragma once

#include "abi.h"
#include "vector.h"

namespace {

using namespace treadle;

constexpr int64_t TILE = 64;           // keys of one softmax step
constexpr int64_t CHUNK = 512;         // keys of one independent partial result
constexpr int64_t TILE_ROWS = 48;      // rows that share one pass over keys and values
constexpr int64_t GATHER = 4;          // keys whose scores are summed together
constexpr int64_t SPLIT_BYTES = 16 << 20;  // most memory for partial results of chunks computed apart
constexpr int64_t UNITS_PER_THREAD = 4;    // with fewer units than this, long contexts are split
constexpr int64_t WORK_PER_THREAD = 1 << 18;  // multiplications that outweigh waking a thread: some 30 us
constexpr float MINUS_INF = -__builtin_inff();

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

struct Range {
  int64_t begin, end;
  INLINE bool empty() const { return begin >= end; }
};

INLINE Range overlap(Range a, Range b) { return {max(a.begin, b.begin), min(a.end, b.end)}; }
INLINE Range hull(Range a, Range b) {
  if (a.empty()) return b;
  if (b.empty()) return a;
  return {min(a.begin, b.begin), max(a.end, b.end)};
}

// ---------------------------------------------------------------- micro kernels

// Rows of the next tile, key and value each, to be on their way from memory while this tile is computed.
struct Ahead {
  const void* const* rows;  // one for each place of a tile, or null
  int64_t bytes;
  INLINE void fetch(int64_t j) const {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char*)rows[j] + b);
  }
};

// scores[r][j] = q_r . k_j for R rows and keys [begin, end), both multiples of GATHER.
template <typename T, int R>
NOINLINE void score_rows(const float* q, int64_t width, const T* const* keys, Range range, float* scores, Ahead ahead) {
  for (int64_t j = range.begin; j < range.end; j += GATHER) {
    if (ahead.rows)
      for (int64_t i = 0; i < GATHER; ++i) ahead.fetch(j + i);
    vf acc[R][GATHER] = {};
    for (int64_t d = 0; d < width; d += LANES) {
      vf row[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) row[r] = load(q + r * width + d);
#pragma GCC unroll 8
      for (int i = 0; i < GATHER; ++i) {
        const vf key = load(keys[j + i] + d);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r][i] = fma(row[r], key, acc[r][i]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const vf4 sums = sum4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
      __builtin_memcpy(scores + r * TILE + j, &sums, sizeof sums);
    }
  }
}

// acc[r][:] += weights[r][j] * v_j for R rows, V vectors from column d on, keys [begin, end).
template <typename T, int R, int V>
INLINE void add_columns(const float* weights, const T* const* values, Range range, int64_t width, int64_t d, float* acc) {
  vf sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) sums[r][i] = load(acc + r * width + d + i * LANES);
  for (int64_t j = range.begin; j < range.end; ++j) {
    const T* value = values[j] + d;
    vf weight[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) weight[r] = splat(weights[r * TILE + j]);
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) {
      const vf x = load(value + i * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r][i] = fma(weight[r], x, sums[r][i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) store(acc + r * width + d + i * LANES, sums[r][i]);
}

template <typename T, int R>
NOINLINE void add_values(const float* weights, const T* const* values, Range range, int64_t width, float* acc) {
  int64_t d = 0;
  for (; d + 4 * LANES <= width; d += 4 * LANES) add_columns<T, R, 4>(weights, values, range, width, d, acc);
  for (; d < width; d += LANES) add_columns<T, R, 1>(weights, values, range, width, d, acc);
}

// Calls kernel.template run<R>() for the number of rows there is, 1 to ROW_GROUP.
template <typename Kernel>
INLINE void for_rows(int64_t rows, const Kernel& kernel) {
  switch (rows) {
    case 1: return kernel.template run<1>();
    case 2: return kernel.template run<2>();
    case 3: return kernel.template run<3>();
#if ROW_GROUP == 4
    case 4: return kernel.template run<4>();
#endif
  }
}

template <typename T>
struct Score {
  const float* q;
  int64_t width;
  const T* const* keys;
  Range range;
  float* scores;
  Ahead ahead;
  template <int R> INLINE void run() const { score_rows<T, R>(q, width, keys, range, scores, ahead); }
};

template <typename T>
struct AddValues {
  const float* weights;
  const T* const* values;
  Range range;
  int64_t width;
  float* acc;
  template <int R> INLINE void run() const { add_values<T, R>(weights, values, range, width, acc); }
};

// ---------------------------------------------------------------- softmax state

// Of each row: maximum score, sum of weights, weighted sum of values (not yet divided).
struct State {
  float* peak;    // [rows]
  float* weight;  // [rows]
  float* values;  // [rows][width]
};

INLINE int64_t state_floats(int64_t rows, int64_t width) { return rows * width + round_up(2 * rows, 16); }

INLINE State state_at(float* memory, int64_t rows, int64_t width) {
  return {memory + rows * width, memory + rows * width + rows, memory};
}

INLINE void clear(State s, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; ++r) s.peak[r] = MINUS_INF, s.weight[r] = 0.f;
  __builtin_memset(s.values, 0, rows * width * sizeof(float));
}

// total += part, by their log-sum-exp. Merging into a cleared state, or a part that saw nothing, changes no bit.
INLINE void merge(State total, State part, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; ++r) {
    if (part.peak[r] == MINUS_INF && part.weight[r] == 0.f) continue;  // a NaN must not be lost here
    const float peak = part.peak[r] > total.peak[r] ? part.peak[r] : total.peak[r];
    const float keep = exp(total.peak[r] - peak), add = exp(part.peak[r] - peak);
    total.peak[r] = peak;
    total.weight[r] = total.weight[r] * keep + part.weight[r] * add;
    float* to = total.values + r * width;
    const float* from = part.values + r * width;
    for (int64_t d = 0; d < width; d += LANES) store(to + d, load(to + d) * keep + load(from + d) * add);
  }
}

// Turns the scores of one row into weights and moves its state on by one tile. `seen` are its keys, within the tile.
INLINE void softmax_step(float* scores, Range seen, int64_t num_keys, const Layer& layer, State s, int64_t r,
                         int64_t width) {
  vi lane;
  for (int i = 0; i < LANES; ++i) lane[i] = i;
  const vf minus_inf = splat(MINUS_INF);
  const bool masked = seen.begin > 0 || seen.end < num_keys;
  vf best = minus_inf;
  for (int64_t j = 0; j < num_keys; j += LANES) {
    vf x = load(scores + j) * layer.scale;
    if (layer.softcap > 0.f) x = tanh(x / layer.softcap) * layer.softcap;
    if (masked) {
      const vi key = lane + (int32_t)j;
      x = select((key >= (int32_t)seen.begin) & (key < (int32_t)seen.end), x, minus_inf);
    }
    store(scores + j, x);
    best = maximum(best, x);
  }
  const float highest = maximum(best), old = s.peak[r];
  const float peak = highest > old ? highest : old;
  const float base = peak == MINUS_INF ? 0.f : peak;
  vf total = {};
  for (int64_t j = 0; j < num_keys; j += LANES) {
    const vf weight = exp(load(scores + j) - base);
    store(scores + j, weight);
    total += weight;
  }
  const float keep = peak == old ? 1.f : exp(old - base);
  s.peak[r] = peak;
  s.weight[r] = s.weight[r] * keep + sum(total);
  if (keep == 1.f) return;
  float* values = s.values + r * width;
  for (int64_t d = 0; d < width; d += LANES) store(values + d, load(values + d) * keep);
}

// ---------------------------------------------------------------- one call

// One unit of work: some tokens of one request times the query heads of one KV head.
//   rows = token-major: row = (token - first_token) * heads + (head - first_head)
struct Unit {
  int64_t request, first_token, num_tokens;  // tokens count from the request's first query row
  int64_t kv_head, first_head, heads;
  INLINE int64_t rows() const { return num_tokens * heads; }
};

// How the units of one request are numbered: index = ((tile * head_groups + head_group) * chunks + chunk).
struct RequestPlan {
  int64_t first_unit;   // among the units of the call
  int64_t tiles, chunks;  // chunks 1: not split
  int64_t first_chunk;
  int64_t first_slot;   // of its partial results
};

struct Plan {
  RequestPlan* requests;
  float* partials;
  int64_t num_units, num_slots, num_threads;
};

template <typename T>
class PagedAttention {
  static constexpr bool READS_PAGES = !__is_same(T, f16);

 public:
  PagedAttention(const Layer& layer, const Batch& batch, const Cache& cache, const Rows& q, const Rows& out,
                 GrowBuffer grow)
      : layer(layer), batch(batch), cache(cache), q(q), out(out), grow(grow),
        group(layer.num_heads / layer.num_kv_heads),
        tile_heads(min(group, TILE_ROWS)),
        tile_tokens(TILE_ROWS / tile_heads),
        head_groups(layer.num_kv_heads * ceil_div(group, tile_heads)),
        width(round_up(layer.head_size, LANES)) {}

  int64_t run() {
    Plan plan;
    if (int64_t status = make_plan(plan)) return status;
    const int64_t threads = max(1, min(plan.num_threads, plan.num_units));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      float* memory = (float*)grow(WORK, work_bytes());
      if (!memory) fail(NO_MEMORY);
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < plan.num_units; ++i)  // backwards: later tiles see more keys
        if (memory) run_unit(plan, plan.num_units - 1 - i, memory);
      if (plan.num_slots > 0) {  // the loop above has ended on all threads
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < plan.num_units; ++i)
          if (memory) merge_unit(plan, i, memory);
      }
    }
    return status;
  }

 private:
  const Layer& layer;
  const Batch& batch;
  const Cache& cache;
  const Rows& q;
  const Rows& out;
  const GrowBuffer grow;
  const int64_t group, tile_heads, tile_tokens, head_groups, width;
  int64_t status = OK;

  void fail(Status why) { __atomic_store_n(&status, why, __ATOMIC_RELAXED); }

  int64_t query_len(int64_t r) const { return batch.query_start_loc[r + 1] - batch.query_start_loc[r]; }

  // Positions the token sees; `token` counts from the request's first query row.
  INLINE Range visible(int64_t request, int64_t token) const {
    const int64_t seq_len = batch.seq_lens[request], position = seq_len - query_len(request) + token;
    const int64_t reach = layer.window > 0 ? layer.window : seq_len + 1;
    return {max(0, position - reach + 1), batch.causal ? position + 1 : min(seq_len, position + reach)};
  }

  INLINE Range visible(const Unit& u) const {  // both ends grow with the token
    return {visible(u.request, u.first_token).begin, visible(u.request, u.first_token + u.num_tokens - 1).end};
  }

  // ---- plan

  int64_t make_plan(Plan& plan) {
    const int64_t num = batch.num_requests, bytes = (num + 1) * sizeof(RequestPlan);
    plan.requests = (RequestPlan*)grow(PLAN, bytes + SPLIT_BYTES);
    if (!plan.requests) return NO_MEMORY;
    plan.partials = (float*)((char*)plan.requests + round_up(bytes, 64));
    int64_t whole = 0, pairs = 0;
    for (int64_t r = 0; r < num; ++r) {
      const int64_t length = query_len(r), seq_len = batch.seq_lens[r];
      const bool fits = seq_len <= batch.max_blocks * cache.block_size &&
                        batch.query_start_loc[r + 1] <= batch.num_tokens;
      if (length < 0 || (length > 0 && (seq_len < length || !fits))) return BAD_LENGTH;
      plan.requests[r].tiles = ceil_div(length, tile_tokens);
      whole += plan.requests[r].tiles * head_groups;
      pairs += length * (layer.window > 0 ? min(layer.window, seq_len) : seq_len);
    }
    plan.num_threads = min(batch.num_threads, 1 + pairs * layer.num_heads * layer.head_size / WORK_PER_THREAD);
    number_units(plan, whole < plan.num_threads * UNITS_PER_THREAD && plan.num_threads > 1);
    return OK;
  }

  void number_units(Plan& plan, bool split) {
    const int64_t max_slots = (SPLIT_BYTES - 128) / slot_bytes();
    plan.num_units = plan.num_slots = 0;
    for (int64_t r = 0; r < batch.num_requests; ++r) {
      RequestPlan& p = plan.requests[r];
      p.first_unit = plan.num_units;
      p.first_slot = plan.num_slots;
      p.first_chunk = 0;
      p.chunks = 1;
      const int64_t whole = p.tiles * head_groups;
      if (split && whole > 0) {
        const Range seen = hull(visible(r, 0), visible(r, query_len(r) - 1));
        const int64_t first = seen.begin / CHUNK, chunks = ceil_div(seen.end, CHUNK) - first;
        if (chunks > 1 && plan.num_slots + whole * chunks <= max_slots) {
          p.first_chunk = first;
          p.chunks = chunks;
          plan.num_slots += whole * chunks;
        }
      }
      plan.num_units += whole * p.chunks;
    }
    plan.requests[batch.num_requests].first_unit = plan.num_units;
  }

  int64_t request_of(const Plan& plan, int64_t unit) const {
    int64_t low = 0, high = batch.num_requests;  // first_unit[low] <= unit < first_unit[high]
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (plan.requests[middle].first_unit <= unit ? low : high) = middle;
    }
    return low;
  }

  Unit unit_at(int64_t request, int64_t tile, int64_t head_group) const {
    const int64_t parts = head_groups / layer.num_kv_heads;
    const int64_t offset = head_group % parts * tile_heads, kv_head = head_group / parts;
    const int64_t first_token = tile * tile_tokens;
    return {request, first_token, min(tile_tokens, query_len(request) - first_token),
            kv_head, kv_head * group + offset, min(tile_heads, group - offset)};
  }

  // ---- scratch memory of one thread: q | state of a chunk | state of all chunks | scores | gathered keys and values

  int64_t max_rows() const { return tile_tokens * tile_heads; }
  int64_t slot_bytes() const { return state_floats(max_rows(), width) * sizeof(float); }
  int64_t work_bytes() const {
    const int64_t floats = max_rows() * (width + TILE) + 2 * state_floats(max_rows(), width) + TILE * 2 * width;
    return floats * sizeof(float);
  }
  struct Work {
    float* q;
    State chunk, all;
    float* scores;
    float* gathered;
  };
  Work work_at(float* memory) const {
    const int64_t rows = max_rows(), state = state_floats(rows, width);
    float* states = memory + rows * width;
    float* scores = states + 2 * state;
    return {memory, state_at(states, rows, width), state_at(states + state, rows, width), scores, scores + rows * TILE};
  }

  // ---- units

  void run_unit(const Plan& plan, int64_t index, float* memory) {
    const int64_t request = request_of(plan, index);
    const RequestPlan& p = plan.requests[request];
    const int64_t local = index - p.first_unit, chunk = local % p.chunks, whole = local / p.chunks;
    const Unit u = unit_at(request, whole / head_groups, whole % head_groups);
    Work w = work_at(memory);
    load_queries(u, w.q);
    if (p.chunks > 1) {
      w.chunk = state_at(partial(plan, p, local), max_rows(), width);
      run_chunk(u, p.first_chunk + chunk, w);
      return;
    }
    const Range seen = visible(u);
    const int64_t first = seen.begin / CHUNK, end = ceil_div(seen.end, CHUNK);
    if (end - first == 1) {
      run_chunk(u, first, w);
      return finish(u, w.chunk);
    }
    clear(w.all, u.rows(), width);
    for (int64_t c = first; c < end; ++c) {
      run_chunk(u, c, w);
      merge(w.all, w.chunk, u.rows(), width);
    }
    finish(u, w.all);
  }

  // The unit of a split request's first chunk merges all of them, left to right.
  void merge_unit(const Plan& plan, int64_t index, float* memory) {
    const int64_t request = request_of(plan, index);
    const RequestPlan& p = plan.requests[request];
    const int64_t local = index - p.first_unit, whole = local / p.chunks;
    if (p.chunks == 1 || local % p.chunks != 0) return;
    const Unit u = unit_at(request, whole / head_groups, whole % head_groups);
    const State all = work_at(memory).all;
    clear(all, u.rows(), width);
    for (int64_t c = 0; c < p.chunks; ++c)
      merge(all, state_at(partial(plan, p, local + c), max_rows(), width), u.rows(), width);
    finish(u, all);
  }

  float* partial(const Plan& plan, const RequestPlan& p, int64_t local) const {
    return plan.partials + (p.first_slot + local) * state_floats(max_rows(), width);
  }

  void load_queries(const Unit& u, float* to) const {
    const int64_t first = batch.query_start_loc[u.request] + u.first_token;
    for (int64_t t = 0; t < u.num_tokens; ++t)
      for (int64_t h = 0; h < u.heads; ++h, to += width) {
        const T* from = (const T*)q.data + (first + t) * q.token_stride + (u.first_head + h) * q.head_stride;
        copy_row(from, to);
      }
  }

  INLINE void copy_row(const T* from, float* to) const {
    int64_t d = 0;
    for (; d + LANES <= layer.head_size; d += LANES) store(to + d, load(from + d));
    for (; d < layer.head_size; ++d) to[d] = to_float(from[d]);
    for (; d < width; ++d) to[d] = 0.f;
  }

  // Few rows read pages as they are; many, a head size with a remainder, and float16 (rare on CPUs, not worth the
  // code) pay for float32 copies of each tile.
  void run_chunk(const Unit& u, int64_t chunk, const Work& w) {
    clear(w.chunk, u.rows(), width);
    const Range seen = overlap(visible(u), {chunk * CHUNK, (chunk + 1) * CHUNK});
    const bool in_place = READS_PAGES && width == layer.head_size && (sizeof(T) == 4 || u.rows() <= ROW_GROUP);
    const T* pages[2][TILE];  // of this tile and of the next
    int64_t start = seen.begin / TILE * TILE;
    if (start < seen.end) find_keys(u, start, overlap(seen, {start, start + TILE}), pages[0]);
    for (int64_t i = 0; start < seen.end; start += TILE, i ^= 1) {
      const Range tile = overlap(seen, {start, start + TILE}), next = overlap(seen, {start + TILE, start + 2 * TILE});
      Ahead ahead = {};
      if (!next.empty()) {
        find_keys(u, start + TILE, next, pages[i ^ 1]);
        ahead = {(const void* const*)pages[i ^ 1], 2 * layer.head_size * (int64_t)sizeof(T)};
      }
      if (in_place) {
        if constexpr (READS_PAGES) run_tile<T>(u, start, tile, pages[i], layer.head_size, w, ahead);
      } else {
        const float* copies[TILE];
        gather(pages[i], start, tile, w.gathered, copies);
        run_tile<float>(u, start, tile, copies, width, w, ahead);
      }
    }
  }

  // keys[position - start] for each position of the tile; the places around it repeat a neighbour, to be masked.
  void find_keys(const Unit& u, int64_t start, Range tile, const T** keys) {
    const int32_t* table = batch.block_table + u.request * batch.block_table_stride;
    const T* head = (const T*)cache.data + u.kv_head * cache.head_stride;
    for (int64_t position = tile.begin; position < tile.end;) {
      const int64_t logical = position / cache.block_size, end = min(tile.end, (logical + 1) * cache.block_size);
      int64_t block = table[logical];
      if (block < 0 || block >= cache.num_blocks) fail(BAD_BLOCK), block = 0;
      const T* page = head + block * cache.block_stride - logical * cache.block_size * cache.token_stride;
      for (; position < end; ++position) keys[position - start] = page + position * cache.token_stride;
    }
    for (int64_t j = 0; j < tile.begin - start; ++j) keys[j] = keys[tile.begin - start];
    for (int64_t j = tile.end - start; j < TILE; ++j) keys[j] = keys[tile.end - start - 1];
  }

  void gather(const T* const* keys, int64_t start, Range tile, float* memory, const float** copies) const {
    const int64_t begin = (tile.begin - start) / GATHER * GATHER, end = round_up(tile.end - start, GATHER);
    for (int64_t j = begin; j < end; ++j) {
      float* to = memory + j * 2 * width;
      copy_row(keys[j], to);
      copy_row(keys[j] + layer.head_size, to + width);
      copies[j] = to;
    }
  }

  template <typename K>
  void run_tile(const Unit& u, int64_t start, Range tile, const K* const* keys, int64_t value_offset, const Work& w,
                Ahead ahead) {
    const K* values[TILE];
    for (int64_t j = tile.begin - start; j < tile.end - start; ++j) values[j] = keys[j] + value_offset;
    const int64_t num_keys = round_up(tile.end - start, LANES);
    for (int64_t row = 0; row < u.rows(); row += ROW_GROUP) {
      const int64_t rows = min(ROW_GROUP, u.rows() - row);
      Range seen[ROW_GROUP], any = {0, 0};
      for (int64_t r = 0; r < rows; ++r) {
        const Range positions = overlap(visible(u.request, u.first_token + (row + r) / u.heads), tile);
        seen[r] = {positions.begin - start, positions.end - start};
        any = hull(any, seen[r]);
      }
      if (any.empty()) continue;
      float* scores = w.scores + row * TILE;
      const Range padded = {any.begin / GATHER * GATHER, round_up(any.end, GATHER)};
      for_rows(rows, Score<K>{w.q + row * width, width, keys, padded, scores, ahead});
      ahead.rows = nullptr;  // once is enough
      for (int64_t r = 0; r < rows; ++r)
        softmax_step(scores + r * TILE, seen[r], num_keys, layer, w.chunk, row + r, width);
      for_rows(rows, AddValues<K>{scores, values, any, width, w.chunk.values + row * width});
    }
  }

  // Divides by the sum of weights, the sink's included, and writes the rows out. A row that saw nothing is zero.
  void finish(const Unit& u, State s) const {
    const int64_t first = batch.query_start_loc[u.request] + u.first_token;
    for (int64_t row = 0; row < u.rows(); ++row) {
      const int64_t head = u.first_head + row % u.heads;
      float weight = s.weight[row], factor = 1.f;
      if (layer.sinks) {
        const float sink = layer.sinks[head], peak = sink > s.peak[row] ? sink : s.peak[row];
        factor = exp(s.peak[row] - peak);
        weight = weight * factor + exp(sink - peak);
      }
      factor = s.peak[row] == MINUS_INF && weight == weight ? 0.f : factor / weight;
      T* to = (T*)out.data + (first + row / u.heads) * out.token_stride + head * out.head_stride;
      const float* values = s.values + row * width;
      for (int64_t d = 0; d < layer.head_size; ++d) from_float(values[d] * factor, to + d);
    }
  }
};

template <typename T>
int64_t attention_of(const Layer& layer, const Batch& batch, const Cache& cache, const Rows& q, const Rows& out,
                     GrowBuffer grow) {
  return PagedAttention<T>(layer, batch, cache, q, out, grow).run();
}

INLINE int64_t attention(const Layer& layer, const Batch& batch, const Cache& cache, const Rows& q, const Rows& out,
                         GrowBuffer grow) {
  switch (layer.dtype) {
    case BF16: return attention_of<bf16>(layer, batch, cache, q, out, grow);
    case F16: return attention_of<f16>(layer, batch, cache, q, out, grow);
    default: return attention_of<float>(layer, batch, cache, q, out, grow);
  }
}

}  // namespace

// One packed step of a whole decoder of Llama's kind: RMSNorm, attention with rotary positions, SwiGLU, language-model head.
//
// All threads go through the layers together and meet where one needs what others made. Between meetings they take strips
// of the weight matrices, or units of attention, one by one. The residual stream, logits and everything between the
// matrices are in float32.

#include <atomic>
#include <cmath>
#include <memory>
#include <type_traits>
#include <vector>

#include "linear.h"
#include "ragged.h"
#include "few.h"

namespace {

using namespace precis;

// Columns of a table in Python: precis/decoder.py. Addresses; 0: the model has none.
struct Layer {
  int64_t input_norm, query, key, value, query_bias, key_bias, value_bias, query_norm, key_norm, output, output_bias,
      middle_norm, gate, up, down, cosines, sines, window;
};

struct Shape {
  int32_t n_layers, hidden, n_heads, n_kv_heads, head_dim, inner, vocabulary, n_positions, bfloat16;
  float epsilon, scaling, softcap;
};

struct Call {
  const Layer* layers;
  const void *embedding, *head;
  const float* last_norm;
  const int64_t* token_ids;
  const int32_t* positions;
  int n_tokens;
  const Run* runs;
  int n_runs;  // of each layer
  const Place* places;
  const int32_t* wanted;
  int n_wanted;
  float* logits;
};

const float* floats(int64_t address) { return reinterpret_cast<const float*>(address); }

void normalised(const float* from, const float* weight, int size, float epsilon, float* to) {
  Vec sum{};
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) sum += load(from + i) * load(from + i);
  float total = sum_of(sum);
  for (; i < size; i++) total += from[i] * from[i];
  const float factor = 1.0f / std::sqrt(total / size + epsilon);
  for (int j = 0; j < size; j++) to[j] = from[j] * factor * weight[j];
}

// x times the logistic function of x.
void activate(const float* gate, const float* up, int n, float* to) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec x = load(gate + i), size = x > 0.0f ? x : -x, e = exp_of(-size);
    const Vec share = (x > 0.0f ? all(1.0f) : e) / (e + 1.0f);
    store(to + i, x * share * load(up + i));
  }
  for (; i < n; i++) to[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

template <class Number, class Worker>
class Decoding {
 public:
  Decoding(const Shape& shape, const Call& call, int n_threads)
      : s_(shape), c_(call), rows_{call.n_tokens, shape.n_heads / shape.n_kv_heads}, width_(padded(shape.head_dim)),
        n_rows_(call.n_tokens * shape.n_heads),
        all_heads_((shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim), state_(size(shape.hidden)),
        heads_(size(all_heads_)), query_(static_cast<size_t>(n_rows_) * width_),
        attended_(size(shape.n_heads * shape.head_dim)), inner_(size(shape.inner)), row_positions_(n_rows_ + kLanes),
        n_threads_(n_threads), taken_(new std::atomic<int>[(shape.n_layers * kPhases + 1) * n_threads]),
        workers_(places_to_work<Worker>(n_threads, shape.head_dim)) {
    for (int i = 0; i < (shape.n_layers * kPhases + 1) * n_threads; i++) taken_[i] = 0;
    const int widest = std::max({shape.hidden, shape.inner, shape.n_heads * shape.head_dim});
    for (int i = 0; i < n_threads; i++) own_.emplace_back(new Own(call.n_tokens, shape.hidden, widest));
    for (int row = 0; row < n_rows_; row++) row_positions_[row] = c_.positions[rows_.token_of(row)];
  }

  void run(int thread, int n) {
    const Setting<Number> setting;
    if (thread == 0) embed();
    meet(n);
    for (int layer = 0; layer < s_.n_layers; layer++) {
      std::atomic<int>* taken = &taken_[layer * kPhases * n_threads_];
      const Layer& w = c_.layers[layer];
      project(w, taken, thread, n);
      meet(n);
      turn(w, layer, taken[n_threads_]);
      meet(n);
      attend(w, layer, taken[2 * n_threads_], thread);
      meet(n);
      merge(taken[3 * n_threads_]);
      meet(n);
      add_attended(w, taken + 4 * n_threads_, thread, n);
      meet(n);
      widen(w, taken + 5 * n_threads_, thread, n);
      meet(n);
      add_inner(w, taken + 6 * n_threads_, thread, n);
      meet(n);
    }
    read_out(&taken_[s_.n_layers * kPhases * n_threads_], thread, n);
  }

 private:
  static constexpr int kPhases = 7;

  // What one thread needs for itself.
  struct Own {
    Own(int n_tokens, int hidden, int widest)
        : normed(static_cast<size_t>(n_tokens) * hidden), gates(static_cast<size_t>(n_tokens) * kStrip * 2) {
      x.reserve(n_tokens, widest);
    }
    Floats normed, gates;
    Activations<Number> x;
  };

  size_t size(int each) const { return static_cast<size_t>(c_.n_tokens) * each; }

  void meet(int n) { meeting_.wait(n); }

  static const Number* numbers(int64_t address) { return reinterpret_cast<const Number*>(address); }

  // Strips of a matrix with so many rows: each thread its own part from front to back, as memory likes it, and then what
  // is left of the others'.
  template <class Each>
  static void strips(int n_rows, std::atomic<int>* taken, int thread, int n_threads, const Each& each) {
    const int n = (n_rows + kStrip - 1) / kStrip;
    for (int i = 0; i < n_threads; i++) {
      const int whose = (thread + i) % n_threads;
      const int first = n * whose / n_threads, stop = n * (whose + 1) / n_threads;
      for (int at; (at = first + taken[whose]++) < stop;) each(at * kStrip, std::min(kStrip, n_rows - at * kStrip));
    }
  }

  void embed() {
    const Number* table = static_cast<const Number*>(c_.embedding);
    for (int token = 0; token < c_.n_tokens; token++)
      for (int i = 0; i < s_.hidden; i++)
        state_[static_cast<size_t>(token) * s_.hidden + i] =
            widened(table[static_cast<size_t>(c_.token_ids[token]) * s_.hidden + i]);
  }

  void take_normed(int64_t norm, Own& own) {
    for (int token = 0; token < c_.n_tokens; token++) {
      const size_t at = static_cast<size_t>(token) * s_.hidden;
      normalised(&state_[at], floats(norm), s_.hidden, s_.epsilon, &own.normed[at]);
    }
    own.x.take(own.normed.get(), c_.n_tokens, s_.hidden);
  }

  // Queries, keys and values, side by side.
  void project(const Layer& w, std::atomic<int>* taken, int thread, int n) {
    Own& own = *own_[thread];
    take_normed(w.input_norm, own);
    const int of_query = s_.n_heads * s_.head_dim, of_key = s_.n_kv_heads * s_.head_dim;
    const int n_query = (of_query + kStrip - 1) / kStrip, n_key = (of_key + kStrip - 1) / kStrip;
    strips((n_query + 2 * n_key) * kStrip, taken, thread, n, [&](int at, int) {
      int strip = at / kStrip, rows = of_query, before = 0;
      int64_t weight = w.query, bias = w.query_bias;
      if (strip >= n_query) {
        const bool second = strip >= n_query + n_key;
        strip -= n_query + (second ? n_key : 0);
        rows = of_key;
        before = of_query + (second ? of_key : 0);
        weight = second ? w.value : w.key;
        bias = second ? w.value_bias : w.key_bias;
      }
      const int first = strip * kStrip, n_rows = std::min(kStrip, rows - first);
      float* out = &heads_[before + first];
      own.x.times(numbers(weight) + static_cast<size_t>(first) * s_.hidden, n_rows, out, all_heads_);
      if (bias)
        for (int token = 0; token < c_.n_tokens; token++)
          for (int r = 0; r < n_rows; r++) out[static_cast<size_t>(token) * all_heads_ + r] += floats(bias)[first + r];
    });
  }

  // Queries and keys to their positions; keys and values to the tails; and what attention will do.
  void turn(const Layer& w, int layer, std::atomic<int>& taken) {
    const int n_heads = s_.n_heads + s_.n_kv_heads, dim = s_.head_dim;
    for (int task; (task = taken++) < c_.n_tokens * n_heads + 1;) {
      if (task == 0) {
        plan(layer);
        continue;
      }
      const int token = (task - 1) / n_heads, head = (task - 1) % n_heads;
      float* from = &heads_[static_cast<size_t>(token) * all_heads_ + head * dim];
      const bool is_query = head < s_.n_heads;
      const int64_t norm = is_query ? w.query_norm : w.key_norm;
      if (norm) normalised(from, floats(norm), dim, s_.epsilon, from);
      const float* cosines = floats(w.cosines) + static_cast<size_t>(c_.positions[token]) * dim;
      const float* sines = floats(w.sines) + static_cast<size_t>(c_.positions[token]) * dim;
      for (int d = 0; d < dim / 2; d++) {
        const float a = from[d], b = from[d + dim / 2];
        from[d] = a * cosines[d] - b * sines[d];
        from[d + dim / 2] = b * cosines[d + dim / 2] + a * sines[d + dim / 2];
      }
      if (is_query) {
        const int row = rows_.at(head, token);
        const float factor = Worker::kScales ? 1.0f : s_.scaling;
        for (int d = 0; d < dim; d++) query_[static_cast<size_t>(row) * width_ + d] = from[d] * factor;
        continue;
      }
      const int kv_head = head - s_.n_heads;
      const Place& place = c_.places[(static_cast<size_t>(layer) * c_.n_tokens + token) * s_.n_kv_heads + kv_head];
      const float* value = from + s_.n_kv_heads * dim;
      auto* key_to = reinterpret_cast<Number*>(place.key);
      auto* value_to = reinterpret_cast<Number*>(place.value);
      for (int d = 0; d < dim; d++) {
        narrow(from[d], key_to[d]);
        narrow(value[d], value_to[d]);
      }
      *reinterpret_cast<int32_t*>(place.position) = c_.positions[token];
    }
  }

  void plan(int layer) {
    partials_.plan(c_.runs + static_cast<size_t>(layer) * c_.n_runs, c_.n_runs, width_, static_cast<int>(own_.size()));
    partials_.index(n_rows_);
  }

  void attend(const Layer& w, int layer, std::atomic<int>& taken, int thread) {
    const int window = static_cast<int>(w.window);
    const Ragged call{query_.get(), row_positions_.data(), n_rows_, s_.head_dim, s_.softcap, window, s_.scaling};
    const Run* runs = c_.runs + static_cast<size_t>(layer) * c_.n_runs;
    const int n = static_cast<int>(partials_.units.size());
    for (int i; (i = taken++) < n;) workers_[thread].run(call, runs[partials_.units[i].run], partials_.units[i], partials_);
  }

  void merge(std::atomic<int>& taken) {
    float found[1024];
    for (int row; (row = taken++) < n_rows_;) {
      merged(partials_, row, width_, kNothing, found);
      const int head = rows_.head_of(row), token = rows_.token_of(row);
      std::copy_n(found, s_.head_dim, &attended_[(static_cast<size_t>(token) * s_.n_heads + head) * s_.head_dim]);
    }
  }

  void add_attended(const Layer& w, std::atomic<int>* taken, int thread, int n) {
    own_[thread]->x.take(attended_.get(), c_.n_tokens, s_.n_heads * s_.head_dim);
    add(w.output, w.output_bias, s_.n_heads * s_.head_dim, taken, thread, n);
  }

  void add_inner(const Layer& w, std::atomic<int>* taken, int thread, int n) {
    own_[thread]->x.take(inner_.get(), c_.n_tokens, s_.inner);
    add(w.down, 0, s_.inner, taken, thread, n);
  }

  // To the residual stream.
  void add(int64_t weight, int64_t bias, int columns, std::atomic<int>* taken, int thread, int n) {
    Own& own = *own_[thread];
    strips(s_.hidden, taken, thread, n, [&](int first, int n_rows) {
      own.x.times(numbers(weight) + static_cast<size_t>(first) * columns, n_rows, own.gates.get(), kStrip);
      for (int token = 0; token < c_.n_tokens; token++)
        for (int r = 0; r < n_rows; r++)
          state_[static_cast<size_t>(token) * s_.hidden + first + r] +=
              own.gates[token * kStrip + r] + (bias ? floats(bias)[first + r] : 0.0f);
    });
  }

  void widen(const Layer& w, std::atomic<int>* taken, int thread, int n) {
    Own& own = *own_[thread];
    take_normed(w.middle_norm, own);
    float* gates = own.gates.get();
    float* ups = gates + static_cast<size_t>(c_.n_tokens) * kStrip;
    strips(s_.inner, taken, thread, n, [&](int first, int n_rows) {
      const size_t at = static_cast<size_t>(first) * s_.hidden;
      own.x.times(numbers(w.gate) + at, n_rows, gates, kStrip);
      own.x.times(numbers(w.up) + at, n_rows, ups, kStrip);
      for (int token = 0; token < c_.n_tokens; token++)
        activate(gates + token * kStrip, ups + token * kStrip, n_rows, &inner_[static_cast<size_t>(token) * s_.inner + first]);
    });
  }

  void read_out(std::atomic<int>* taken, int thread, int n) {
    Own& own = *own_[thread];
    for (int i = 0; i < c_.n_wanted; i++)
      normalised(&state_[static_cast<size_t>(c_.wanted[i]) * s_.hidden], c_.last_norm, s_.hidden, s_.epsilon,
                 &own.normed[static_cast<size_t>(i) * s_.hidden]);
    own.x.take(own.normed.get(), c_.n_wanted, s_.hidden);
    const Number* head = static_cast<const Number*>(c_.head);
    strips(s_.vocabulary, taken, thread, n, [&](int first, int n_rows) {
      own.x.times(head + static_cast<size_t>(first) * s_.hidden, n_rows, c_.logits + first, s_.vocabulary);
    });
  }

  const Shape s_;
  const Call c_;
  const Rows rows_;
  int width_, n_rows_, all_heads_;
  Floats state_, heads_, query_, attended_, inner_;
  std::vector<int32_t> row_positions_;
  int n_threads_;
  std::unique_ptr<std::atomic<int>[]> taken_;
  std::vector<Worker>& workers_;
  std::vector<std::unique_ptr<Own>> own_;
  Partials partials_;
  Meeting meeting_;
};

template <class Number, class Worker>
void decode(const Shape& shape, const Call& call, int n_threads) {
  Decoding<Number, Worker> decoding(shape, call, n_threads);
  on_team(n_threads, [&](int thread, int n) { decoding.run(thread, n); });
}

}  // namespace

// layers: [L][18] int64; runs: [L][n_runs][8] int64; places: [L][tokens][K][3] int64; logits: [n_wanted][vocabulary].
// Rows are numbered [K][token][G]. Returns 0; 1 if an argument is wrong; 2 if there is no memory.
PRECIS_API int precis_decode(
    const Shape* shape, const int64_t* layers, const void* embedding, const void* head, const float* last_norm,
    const int64_t* token_ids, const int32_t* positions, int n_tokens, const int64_t* runs, int n_runs,
    const int64_t* places, const int32_t* wanted, int n_wanted, float* logits, int n_threads) {
  const Shape& s = *shape;
  const int64_t n_rows = static_cast<int64_t>(n_tokens) * s.n_heads;
  if (n_tokens <= 0 || n_runs < 0 || n_wanted < 0 || n_wanted > n_tokens || n_threads <= 0 || s.n_kv_heads <= 0 ||
      s.n_heads % s.n_kv_heads || s.head_dim <= 0 || s.head_dim % 2 || s.head_dim > 1024 - kLanes)
    return 1;
  for (int i = 0; i < n_tokens; i++)
    if (token_ids[i] < 0 || token_ids[i] >= s.vocabulary || positions[i] < 0 || positions[i] >= s.n_positions) return 1;
  for (int i = 0; i < n_wanted; i++)
    if (wanted[i] < 0 || wanted[i] >= n_tokens) return 1;
  const auto* layer_table = reinterpret_cast<const Layer*>(layers);
  const auto* run_table = reinterpret_cast<const Run*>(runs);
  for (int layer = 0; layer < s.n_layers; layer++)
    for (int i = 0; i < n_runs; i++)
      if (!fits(run_table[static_cast<size_t>(layer) * n_runs + i], n_rows, layer_table[layer].window)) return 1;
  const Call call{layer_table, embedding, head, last_norm, token_ids, positions, n_tokens, run_table, n_runs,
                  reinterpret_cast<const Place*>(places), wanted, n_wanted, logits};
  try {
#if defined(__AMX_BF16__)
    if (s.bfloat16 && AnyBench::fits(s.head_dim)) return decode<Bf16, AnyBench>(s, call, n_threads), 0;
#endif
    if (s.bfloat16) {
      decode<Bf16, Bench<Bf16>>(s, call, n_threads);
    } else {
      decode<float, Bench<float>>(s, call, n_threads);
    }
  } catch (const std::bad_alloc&) {
    return 2;
  }
  return 0;
}

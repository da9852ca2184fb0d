// Interleaved rANS: 32 lanes share one stream, symbol i belongs to lane i mod 32. 12-bit probabilities, 32-bit states,
// 16-bit renormalisation. Every symbol has a context, known to both sides, which chooses its table.
//
// Stream: 32 states, lane 0 first, then 16-bit words, all little-endian. Decoding ends with every state at its start and
// no word left; anything else is damage.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define PRECIS_GATHERS 1
#endif

#include "parallel.h"

namespace {

constexpr int kBits = 12, kLanes = 32, kSymbols = 256;
constexpr uint32_t kTotal = 1u << kBits, kLow = 1u << 16;
constexpr size_t kHeader = kLanes * sizeof(uint32_t);

// Slot -> frequency << 20 | (slot - first slot) << 8 | symbol. A frequency is at most 4095.
bool fill(const uint16_t* frequencies, int n_contexts, std::vector<uint32_t>& slots) {
  slots.assign(static_cast<size_t>(n_contexts) * kTotal, 0);
  for (int context = 0; context < n_contexts; context++) {
    const uint16_t* row = frequencies + static_cast<size_t>(context) * kSymbols;
    uint32_t at = 0;
    for (uint32_t symbol = 0; symbol < kSymbols; symbol++) {
      const uint32_t f = row[symbol];
      if (f >= kTotal || at + f > kTotal) return false;
      for (uint32_t i = 0; i < f; i++)
        slots[static_cast<size_t>(context) * kTotal + at++] = f << 20 | i << 8 | symbol;
    }
    if (at != kTotal) return false;
  }
  return true;
}

struct Reader {
  const uint8_t* at;
  const uint8_t* end;
  bool whole = true;

  uint32_t word() {
    if (end - at < 2) {
      whole = false;
      return 0;
    }
    uint16_t found;
    std::memcpy(&found, at, 2);
    at += 2;
    return found;
  }
};

inline uint32_t advance(uint32_t state, uint32_t entry) {
  return (entry >> 20) * (state >> kBits) + (entry >> 8 & (kTotal - 1));
}

// The whole rows whose words are sure to be there; the number of symbols decoded.
size_t whole_rows(Reader& in, uint32_t* states, const uint8_t* contexts, size_t n, const uint32_t* slots,
                  uint8_t* symbols) {
  size_t i = 0;
#ifdef PRECIS_GATHERS
  const __m512i mask = _mm512_set1_epi32(kTotal - 1), low = _mm512_set1_epi32(kLow);
  __m512i halves[2] = {_mm512_loadu_si512(states), _mm512_loadu_si512(states + 16)};
  for (; i + kLanes <= n && in.end - in.at >= 2 * kLanes; i += kLanes) {
    for (int half = 0; half < 2; half++) {
      __m512i x = halves[half];
      const size_t first = i + 16 * half;
      const __m512i context = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(contexts + first)));
      const __m512i place = _mm512_or_si512(_mm512_slli_epi32(context, kBits), _mm512_and_si512(x, mask));
      const __m512i entry = _mm512_i32gather_epi32(place, slots, 4);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(symbols + first), _mm512_cvtepi32_epi8(entry));
      x = _mm512_add_epi32(_mm512_mullo_epi32(_mm512_srli_epi32(entry, 20), _mm512_srli_epi32(x, kBits)),
                           _mm512_and_si512(_mm512_srli_epi32(entry, 8), mask));
      const __mmask16 empty = _mm512_cmplt_epu32_mask(x, low);
      const int n_words = __builtin_popcount(empty);
      const __m512i words =
          _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in.at)));
      x = _mm512_mask_or_epi32(x, empty, _mm512_slli_epi32(x, 16), _mm512_maskz_expand_epi32(empty, words));
      in.at += 2 * n_words;
      halves[half] = x;
    }
  }
  _mm512_storeu_si512(states, halves[0]);
  _mm512_storeu_si512(states + 16, halves[1]);
#else
  for (; i + kLanes <= n && in.end - in.at >= 2 * kLanes; i += kLanes) {
    for (int lane = 0; lane < kLanes; lane++) {
      const uint32_t entry = slots[static_cast<size_t>(contexts[i + lane]) * kTotal + (states[lane] & (kTotal - 1))];
      symbols[i + lane] = static_cast<uint8_t>(entry);
      const uint32_t state = advance(states[lane], entry);
      uint16_t word;
      std::memcpy(&word, in.at, 2);
      const bool empty = state < kLow;
      states[lane] = empty ? state << 16 | word : state;
      in.at += 2 * empty;
    }
  }
#endif
  return i;
}

bool contexts_fit(const uint8_t* contexts, size_t n, int n_contexts) {
  uint8_t largest = 0;
  for (size_t i = 0; i < n; i++) largest = contexts[i] > largest ? contexts[i] : largest;
  return n == 0 || largest < n_contexts;
}

}  // namespace

// Words are written backwards from the end of `out`. Returns the stream's bytes, which end at out + capacity; -1 if an
// argument is wrong, -2 if a symbol has no frequency, -3 if there is no room.
PRECIS_API int64_t precis_rans_encode(const uint8_t* symbols, const uint8_t* contexts, size_t n,
                                      const uint16_t* frequencies, int n_contexts, uint8_t* out, size_t capacity) {
  if (n_contexts <= 0 || n_contexts > 256 || !contexts_fit(contexts, n, n_contexts)) return -1;
  if (capacity < kHeader) return -3;
  std::vector<uint32_t> firsts;
  try {
    firsts.resize(static_cast<size_t>(n_contexts) * kSymbols);
  } catch (const std::bad_alloc&) {
    return -3;
  }
  for (int context = 0; context < n_contexts; context++) {
    uint32_t sum = 0;
    for (int symbol = 0; symbol < kSymbols; symbol++) {
      const size_t place = static_cast<size_t>(context) * kSymbols + symbol;
      firsts[place] = sum;
      sum += frequencies[place];
    }
    if (sum != kTotal) return -1;
  }
  uint32_t states[kLanes];
  for (auto& state : states) state = kLow;
  uint8_t* at = out + capacity;
  for (size_t i = n; i-- > 0;) {
    const size_t place = static_cast<size_t>(contexts[i]) * kSymbols + symbols[i];
    const uint32_t f = frequencies[place];
    if (f == 0 || f >= kTotal) return -2;
    uint32_t state = states[i % kLanes];
    if (state >= f << (32 - kBits)) {
      if (at - out < static_cast<ptrdiff_t>(kHeader) + 2) return -3;
      at -= 2;
      const uint16_t word = static_cast<uint16_t>(state);
      std::memcpy(at, &word, 2);
      state >>= 16;
    }
    states[i % kLanes] = (state / f << kBits) + state % f + firsts[place];
  }
  at -= kHeader;
  std::memcpy(at, states, kHeader);
  return out + capacity - at;
}

// Returns 0; 1 if an argument is wrong; 2 if there is no memory; 3 if the stream is damaged.
PRECIS_API int precis_rans_decode(const uint8_t* stream, size_t n_bytes, const uint8_t* contexts, size_t n,
                                  const uint16_t* frequencies, int n_contexts, uint8_t* symbols) {
  if (n_contexts <= 0 || n_contexts > 256 || !contexts_fit(contexts, n, n_contexts)) return 1;
  if (n_bytes < kHeader) return 3;
  std::vector<uint32_t> slots;
  try {
    if (!fill(frequencies, n_contexts, slots)) return 1;
  } catch (const std::bad_alloc&) {
    return 2;
  }
  uint32_t states[kLanes];
  std::memcpy(states, stream, kHeader);
  Reader in{stream + kHeader, stream + n_bytes};
  for (size_t i = whole_rows(in, states, contexts, n, slots.data(), symbols); i < n; i++) {
    uint32_t& state = states[i % kLanes];
    const uint32_t entry = slots[static_cast<size_t>(contexts[i]) * kTotal + (state & (kTotal - 1))];
    symbols[i] = static_cast<uint8_t>(entry);
    state = advance(state, entry);
    if (state < kLow) state = state << 16 | in.word();
  }
  bool ended = in.whole && in.at == in.end;
  for (const uint32_t state : states) ended = ended && state == kLow;
  return ended ? 0 : 3;
}

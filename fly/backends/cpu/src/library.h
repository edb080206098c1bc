// Shared by the sources that are compiled without a variant's flags, and so run on any processor: memory, threads, a
// model's workspace, random numbers. Knows nothing of the arithmetic.
#pragma once
#include <stdlib.h>
#include <string.h>

#include "fly.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fly {

enum Error { OK = 0, NO_MEMORY = -11, OUTSIDE = -12, REFUSED = -13 };  // no result of a call is one of these numbers

// Notes why this thread's call fails, for ``fly_refusal``: ``what`` is ``has``, but must be from ``least`` to ``most``.
int refuse(Error error, const char* what, int64_t has, int64_t least, int64_t most = BEYOND);

// OK if the value is within these bounds, else a noted error.
inline int within(const char* what, int64_t has, int64_t least, int64_t most, Error error = REFUSED) {
    return has >= least && has <= most ? OK : refuse(error, what, has, least, most);
}

// OK if a span holds as many values as the product of ``sizes``, else a noted error.
template <class T, class... Sizes>
int holds(const char* what, const Span<T>& span, Sizes... sizes) {
    const int64_t needed = bytes_of<T>(sizes...);
    return needed >= 0 && span.bytes >= needed ? OK : refuse(REFUSED, what, span.bytes, needed < 0 ? BEYOND : needed);
}

template <class T, class... Sizes>
int holds_or_none(const char* what, const Span<T>& span, Sizes... sizes) {
    return span.there() ? holds(what, span, sizes...) : OK;
}

extern const Variant* const variants[];
int check_variant(int variant);

// memcpy, but null is allowed if there is nothing to copy.
template <class T>
inline void copy(T* to, const T* from, int64_t count) {
    if (count > 0) memcpy(to, from, count * sizeof(T));
}

// Returns memory, on large pages if the system has any, filled with zeros if ``zero``. Free it by ``free``. Null if
// there is too little memory.
void* allocate(int64_t bytes, bool zero = true);

// Replaces a block's memory. ``deal`` takes the fields from a dealer twice: first to count their bytes, then from
// memory of that size. Returns an error or OK.
template <class Deal>
int lay_out(Block* block, const char* what, bool zero, Deal deal) {
    Dealer sizes = {nullptr, BEYOND, 0, false};
    deal(sizes);
    free(block->memory);
    *block = {sizes.failed ? nullptr : (char*)allocate(sizes.used, zero), sizes.used};
    if (!block->memory) return refuse(NO_MEMORY, what, 0, sizes.used);
    Dealer dealer = {block->memory, sizes.used, 0, false};
    deal(dealer);
    return dealer.failed ? refuse(REFUSED, what, sizes.used, sizes.used + 1) : OK;
}

// Memory that is freed at the end of a scope.
struct Arena : Block {
    Arena() : Block{nullptr, 0} {}
    ~Arena() { free(memory); }
};

// Holds the model's workspace exclusively until the end of a scope.
struct Locked {
    Model* model;

    explicit Locked(Model* of) : model(of) { pthread_mutex_lock(&model->lock); }
    ~Locked() { pthread_mutex_unlock(&model->lock); }
};

// Runs ``work`` on this thread and up to ``threads`` - 1 workers. It waits at most ``patience`` nanoseconds for workers
// to come.
void run(Call* call, void (*work)(Call*, int), int threads, int64_t patience);

static inline int threads_for(int wanted) { return wanted < 1 ? 1 : min_of(wanted, MAX_THREADS); }

// Makes the workspace large enough for ``tokens`` in a forward, ``last_rows`` logits of a drafter's step, and rows of ``longest``
// stored tokens. Returns an error or OK.
int make_room(Model* model, int tokens, int last_rows, int longest, int threads);

// A matrix of a model by its number (models.cpp: fly_set_matrix), its outputs and its inputs. Returns an error or OK.
struct MatrixPlace {
    Matrix* matrix;
    int n, k;
};
int place_of(Model* model, int number, int which, MatrixPlace* place);

// The row of the checkpoint's matrix that is stored as output ``lane`` of a panel; -1: padding. ``pairs``: a panel
// holds 16 rows of the first half and the same 16 of the second (gates and ups).
inline int source_row(int panel, int lane, int n, bool pairs) {
    if (!pairs) return panel * PANEL + lane < n ? panel * PANEL + lane : -1;
    const int half = n / 2, at = panel * (PANEL / 2) + lane % (PANEL / 2);
    return at >= half ? -1 : lane < PANEL / 2 ? at : half + at;
}
inline int panels_of(int n, bool pairs) { return pairs ? padded(n / 2, PANEL / 2) / (PANEL / 2) : padded(n) / PANEL; }

// ``drop`` frees a matrix's memory. ``bias_of`` gives a matrix a bias [N], and returns false if memory runs out.
void drop(const Matrix& matrix);
bool bias_of(Matrix* matrix, const float* bias, bool pairs);

// float16 as float32.
inline float from_half(uint16_t half) {
    const int exponent = half >> 10 & 31;
    const float fraction = (float)(half & 1023) / 1024, sign = half & 0x8000 ? -1.0f : 1.0f;
    if (exponent == 31) return fraction ? __builtin_nanf("") : sign * __builtin_inff();
    return sign * __builtin_ldexpf(exponent ? 1 + fraction : 2 * fraction, exponent - 15);
}

enum Stream : int { ACCEPT = 0, SAMPLE = 1 };  // fly/ops/random.py: Stream

// ``n`` uniforms of a row's round, in one of two streams (fly/ops/random.py: uniforms).
void uniforms(int64_t seed, int64_t round, int stream, int n, float* uniform);

// The seed of a drafter that drafts from ``position`` on (fly/ops/random.py: derive).
int64_t derived(int64_t seed, int64_t position);

}  // namespace fly

// Exported functions that other sources call (calls.cpp).
EXPORT int fly_score(fly::Model* model, const fly::Batch* batch, fly::Span<const int32_t> kept, fly::Span<float> logits,
                     fly::Span<int32_t> choice, fly::Span<const int32_t> state, fly::Span<char> read);
EXPORT int fly_draft(fly::Model* model, const fly::Batch* batch, int most, fly::Span<const int32_t> limit,
                     fly::Span<const fly::Span<const int64_t>> stop, fly::Span<int64_t> drafted,
                     fly::Span<int32_t> drafted_count, fly::Span<const fly::Sampling> sampling,
                     fly::Span<const float> uniform, fly::Span<float> distributions,
                     fly::Span<const fly::Span<float>> raw, fly::Lookup* lookup,
                     fly::Span<const fly::Span<const int32_t>> texts, fly::Span<const fly::Stops> stops,
                     fly::Span<const char> head_states);
EXPORT int fly_step(fly::Model* model, const fly::Batch* batch, fly::Span<const char> head_states, fly::Span<const float> x,
                    fly::Span<const int32_t> kept, fly::Span<float> logits, fly::Span<float> features);

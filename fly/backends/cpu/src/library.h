// What the sources share that are compiled without a variant's flags, for any processor: memory, threads, a model's
// workspace, random numbers. Knows nothing of what is computed.
#pragma once
#include <stdlib.h>
#include <string.h>

#include "fly.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fly {

enum Error { OK = 0, NO_MEMORY = -11, OUTSIDE = -12, REFUSED = -13 };  // numbers that no call has as a result

// Notes why this thread's call fails, for ``fly_refusal``: ``what`` is ``has``, and not from ``least`` to ``most``.
int refuse(Error error, const char* what, int64_t has, int64_t least, int64_t most = BEYOND);

// The same unless it is.
inline int within(const char* what, int64_t has, int64_t least, int64_t most, Error error = REFUSED) {
    return has >= least && has <= most ? OK : refuse(error, what, has, least, most);
}

// The same unless a span has room for as many values as the product of ``sizes``.
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
int known(int variant);

// What has no memory is not read, even where nothing is.
template <class T>
inline void copy(T* to, const T* from, int64_t count) {
    if (count > 0) memcpy(to, from, count * sizeof(T));
}

// Zeros (unless all is to be written anyway), on large pages where the system gives any; freed by ``free``. Null without
// memory.
void* allocate(int64_t bytes, bool zero = true);

// Memory in place of a block's, whose fields ``deal`` takes from a dealer: once to count what they take, and once again from
// as much. An error or OK.
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

// A call's own, freed at its end.
struct Arena : Block {
    Arena() : Block{nullptr, 0} {}
    ~Arena() { free(memory); }
};

// As long as it lives nobody else has the model's workspace.
struct Locked {
    Model* model;

    explicit Locked(Model* of) : model(of) { pthread_mutex_lock(&model->lock); }
    ~Locked() { pthread_mutex_unlock(&model->lock); }
};

// Runs ``work`` on this thread and up to ``threads`` - 1 workers (the caller's number, brought into bounds), for which
// it waits ``patience`` nanoseconds.
void run(Call* call, void (*work)(Call*, int), int threads, int64_t patience);

static inline int threads_for(int wanted) { return wanted < 1 ? 1 : least_of(wanted, MAX_THREADS); }

// Makes the workspace large enough for ``tokens`` at once, ``last_rows`` of a drafter's step, and rows of ``longest``
// stored tokens. An error or OK.
int make_room(Model* model, int tokens, int last_rows, int longest, int threads);

// A matrix of a model by its number (models.cpp: fly_set_matrix), its outputs and its inputs. An error or OK.
struct MatrixPlace {
    Matrix* matrix;
    int n, k;
};
int place_of(Model* model, int number, int which, MatrixPlace* place);

// The row of the checkpoint's matrix that output ``lane`` of a panel is; -1 is padding. ``pairs``: a panel holds 16 rows of
// the first half and their 16 of the second.
inline int source_row(int panel, int lane, int n, bool pairs) {
    if (!pairs) return panel * PANEL + lane < n ? panel * PANEL + lane : -1;
    const int half = n / 2, at = panel * (PANEL / 2) + lane % (PANEL / 2);
    return at >= half ? -1 : lane < PANEL / 2 ? at : half + at;
}
inline int panels_of(int n, bool pairs) { return pairs ? padded(n / 2, PANEL / 2) / (PANEL / 2) : padded(n) / PANEL; }

// Frees a matrix's memory; gives it a bias [N], false without memory.
void drop(const Matrix& matrix);
bool bias_of(Matrix* matrix, const float* bias, bool pairs);

enum Stream : int { ACCEPT = 0, SAMPLE = 1 };  // fly/runtime/sampling.py: Stream

// ``n`` uniforms of a stream of a round (fly/runtime/sampling.py: uniforms).
void uniforms(int64_t seed, int64_t round, int stream, int n, float* uniform);

// The seed of a drafter that speculates from ``position`` on (fly/runtime/sampling.py: derive).
int64_t derived(int64_t seed, int64_t position);

}  // namespace fly

// What one source exports and another calls.
EXPORT int fly_score(fly::Model* model, const fly::Batch* batch, fly::Span<const int32_t> kept, fly::Span<float> logits,
                     fly::Span<int32_t> choice, fly::Span<const int32_t> state, fly::Span<char> read);
EXPORT int fly_draft(fly::Model* model, const fly::Batch* batch, int most, fly::Span<const int32_t> limit,
                     fly::Span<const fly::Span<const int64_t>> stop, fly::Span<int64_t> drafted,
                     fly::Span<int32_t> drafted_count, fly::Span<const fly::Sampling> sampling,
                     fly::Span<const float> uniform, fly::Span<float> distributions, fly::Lookup* lookup,
                     fly::Span<const fly::Span<const int32_t>> texts, fly::Span<const fly::Sure> sure,
                     fly::Span<const char> given);
EXPORT int fly_step(fly::Model* model, const fly::Batch* batch, fly::Span<const char> given, fly::Span<const float> x,
                    fly::Span<const int32_t> kept, fly::Span<float> logits, fly::Span<char> features);

// What the sources share that are compiled without a variant's flags, for any processor: memory, threads, a model's
// workspace, random numbers. Knows nothing of what is computed.
#pragma once
#include <stdlib.h>
#include <string.h>

#include "fly.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fly {

enum Error { OK = 0, NO_MEMORY = 1, BAD_TOKEN = 2, BAD_POSITION = 3 };

extern const Variant* const variants[];

// Zeros (unless all is to be written anyway), on large pages where the system gives any; freed by ``free``. Null without
// memory.
void* allocate(long bytes, bool zero = true);

// Memory that a call is given for its bookkeeping, freed at its end.
struct Arena : Dealer {
    explicit Arena(long bytes) : Dealer{(char*)malloc(bytes ? bytes : 1), 0} {}
    ~Arena() { free(base); }
};

// [2, V padded] for what is drawn from one row's logits.
struct Spread {
    float* at;

    explicit Spread(int vocab) : at((float*)allocate(2L * padded(vocab) * 4)) {}
    ~Spread() { free(at); }
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
// stored tokens. False without memory.
bool make_room(Model* model, int tokens, int last_rows, int longest, int threads);

enum Stream : int { ACCEPT = 0, SAMPLE = 1 };  // fly/sampling.py: Stream

// ``n`` uniforms of a stream of a round (fly/sampling.py: uniforms).
void uniforms(int64_t seed, int64_t round, int stream, int n, float* uniform);

// The seed of a drafter that speculates from ``position`` on (fly/sampling.py: derive).
int64_t derived(int64_t seed, int64_t position);

}  // namespace fly

// What one source exports and another calls.
EXPORT int fly_score(fly::Model* model, const fly::Batch* batch, const int32_t* kept, int count, float* logits,
                     int32_t* choice, const int32_t* state, int states, void* read);
EXPORT int fly_draft(fly::Model* model, const fly::Batch* batch, int most, const int32_t* limit, const int64_t* stop,
                     const int32_t* stop_at, int64_t* drafted, int32_t* drafted_count, const fly::Sampling* sampling,
                     const float* uniform, float* distributions, fly::Lookup* lookup, const int32_t* const* texts,
                     const fly::Sure* sure, const void* given);
EXPORT int fly_step(fly::Model* model, const fly::Batch* batch, const void* given, const float* x, const int32_t* kept,
                    int count, float* logits, void* features);

// What is called from outside: packing models, calls with their workspace, and the threads that share one.
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fly.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace fly;

namespace {

enum Error { OK = 0, NO_MEMORY = 1, BAD_TOKEN = 2, BAD_POSITION = 3 };

// Zeros, on large pages where the system gives any: a forward reads every weight, and small pages cost time.
void* allocate(long bytes) {
    constexpr long large = 2 << 20;
    void* memory = nullptr;
    if (posix_memalign(&memory, bytes >= large ? large : 64, bytes > 0 ? bytes : 64)) return nullptr;
#ifdef MADV_HUGEPAGE
    if (bytes >= large) madvise(memory, bytes / large * large, MADV_HUGEPAGE);  // the rest would take a whole one
#endif
    memset(memory, 0, bytes > 0 ? bytes : 64);
    return memory;
}

// --- threads -----------------------------------------------------------------------------------------------------

// Workers look out for work for a while after each call, then sleep. A call goes on without those that do not come in
// time, because they sleep or because the processor is somebody else's: the result is the same with any number of them.
// One call at a time has the workers; another that comes meanwhile runs on its caller's thread alone.
struct Pool {
    pthread_mutex_t in_use, lock;
    pthread_cond_t wake;
    int32_t workers;
    int32_t alone, patience;     // calls still to run without workers, after one that had to wait long for them
    alignas(64) int32_t gate;    // workers that joined the next call; -1 is closed
    int32_t places;              // workers it takes
    alignas(64) int32_t started;
    alignas(64) int32_t busy;    // joined workers that have not finished
    alignas(64) int32_t sleeping;
    Call* call;
    void (*work)(Call*, int);
};

Pool pool;

constexpr int64_t LOOK_OUT = 2000000, SPIN = 20000;  // nanoseconds a worker waits for a call, and spins of them
constexpr int32_t SHORTEST = 4, LONGEST = 64;       // calls to run alone after a stall

void reset_pool() {
    memset((void*)&pool, 0, sizeof(pool));
    pthread_mutex_init(&pool.in_use, nullptr);
    pthread_mutex_init(&pool.lock, nullptr);
    pthread_cond_init(&pool.wake, nullptr);
    pool.gate = -1;
    pool.patience = SHORTEST;
}

// Workers do not survive a fork: the child starts without any.
__attribute__((constructor)) void set_up() {
    reset_pool();
    pthread_atfork(nullptr, nullptr, reset_pool);
}

bool gate_is_open() {
    const int32_t joined = __atomic_load_n(&pool.gate, __ATOMIC_SEQ_CST);
    return joined >= 0 && joined < __atomic_load_n(&pool.places, __ATOMIC_ACQUIRE);
}

// The thread number in the call that was joined, or 0 if others were faster.
int join() {
    int32_t joined = __atomic_load_n(&pool.gate, __ATOMIC_ACQUIRE);
    while (joined >= 0 && joined < __atomic_load_n(&pool.places, __ATOMIC_ACQUIRE))
        if (__atomic_compare_exchange_n(&pool.gate, &joined, joined + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return joined + 1;
    return 0;
}

void* worker(void*) {
    for (;;) {
        const int64_t since = nanoseconds();
        for (int64_t waited = 0; !gate_is_open() && waited < LOOK_OUT; waited = nanoseconds() - since)
            if (waited < SPIN)
                fly::pause();
            else
                sched_yield();
        if (const int number = join()) {
            while (!__atomic_load_n(&pool.started, __ATOMIC_ACQUIRE)) fly::pause();
            pool.work(pool.call, number);
            __atomic_sub_fetch(&pool.busy, 1, __ATOMIC_ACQ_REL);
            continue;
        }
        pthread_mutex_lock(&pool.lock);
        __atomic_add_fetch(&pool.sleeping, 1, __ATOMIC_SEQ_CST);
        if (!gate_is_open()) pthread_cond_wait(&pool.wake, &pool.lock);
        __atomic_sub_fetch(&pool.sleeping, 1, __ATOMIC_SEQ_CST);
        pthread_mutex_unlock(&pool.lock);
    }
    return nullptr;
}

// As many workers as wanted, as far as the system gives them.
void hire(int wanted) {
    while (pool.workers < wanted) {
        pthread_t thread;
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        const int failed = pthread_create(&thread, &attributes, worker, nullptr);
        pthread_attr_destroy(&attributes);
        if (failed) return;
        pool.workers++;
    }
}

void run_alone(Call* call, void (*work)(Call*, int)) {
    call->threads = 1;
    work(call, 0);
}

// Runs ``work`` on this thread and up to ``threads`` - 1 workers, for which it waits ``patience`` nanoseconds.
void run(Call* call, void (*work)(Call*, int), int threads, int64_t patience) {
    if (threads <= 1 || pthread_mutex_trylock(&pool.in_use)) return run_alone(call, work);
    if (pool.alone > 0) {
        pool.alone--;
        run_alone(call, work);
        pthread_mutex_unlock(&pool.in_use);
        return;
    }
    hire(threads - 1);
    pool.call = call;
    pool.work = work;
    pool.started = 0;
    __atomic_store_n(&pool.places, threads - 1, __ATOMIC_RELEASE);
    __atomic_store_n(&pool.gate, 0, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool.sleeping, __ATOMIC_SEQ_CST)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    const int64_t since = nanoseconds();
    while (__atomic_load_n(&pool.gate, __ATOMIC_ACQUIRE) < threads - 1 && nanoseconds() - since < patience) fly::pause();
    const int32_t joined = __atomic_exchange_n(&pool.gate, -1, __ATOMIC_ACQ_REL);
    call->threads = joined + 1;
    __atomic_store_n(&pool.busy, joined, __ATOMIC_RELEASE);
    __atomic_store_n(&pool.started, 1, __ATOMIC_RELEASE);
    const int64_t begun = nanoseconds();
    work(call, 0);
    for (int spins = 0; __atomic_load_n(&pool.busy, __ATOMIC_ACQUIRE); spins++)
        if (spins < 1000)
            fly::pause();
        else
            sched_yield();
    // Alone it would have been over sooner; each of them waits for the one.
    if (call->stalled * (joined + 1) > (nanoseconds() - begun) * joined * joined) {
        pool.alone = pool.patience;
        pool.patience = pool.patience * 2 < LONGEST ? pool.patience * 2 : LONGEST;
    } else if (joined) {
        pool.patience = SHORTEST;
    }
    pthread_mutex_unlock(&pool.in_use);
}

// --- the machine -------------------------------------------------------------------------------------------------

struct Reading : Call {
    const uint64_t* from;
    int64_t lines;
    uint64_t sum;
};

void read_part(Call* call, int thread) {
    constexpr int STREAMS = 4, SOON = 32;  // as a product takes panels at once, and lines asked for ahead in each
    Reading* reading = (Reading*)call;
    const int64_t lines = reading->lines / (call->threads * STREAMS);
    const uint64_t* from = reading->from + thread * STREAMS * lines * 8;
    uint64_t sum[8] = {};
    for (int64_t line = 0; line < lines; line++)
        for (int stream = 0; stream < STREAMS; stream++) {
            const uint64_t* at = from + (stream * lines + line) * 8;
            fetch(at + SOON * 8);
            for (int i = 0; i < 8; i++) sum[i] += at[i];
        }
    const int64_t rest = thread ? reading->lines : lines * STREAMS * call->threads;
    for (int64_t i = rest * 8; i < reading->lines * 8; i++) sum[0] += reading->from[i];
    for (int i = 1; i < 8; i++) sum[0] += sum[i];
    __atomic_add_fetch(&reading->sum, sum[0], __ATOMIC_RELAXED);
}

// --- models ------------------------------------------------------------------------------------------------------

const Variant* variants[] = {&avx512bf16, &avx512, &avx2};

bool runs_here(const Variant* variant) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (variant != &avx2)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               (variant == &avx512 || __builtin_cpu_supports("avx512bf16"));
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

int value_bytes(int type) { return type == FLOAT32 ? 4 : type == BFLOAT16 ? 2 : 1; }

// Bytes of a token's narrow values.
long narrow_bytes(const Shape& shape) { return shape.weights == W8A8 ? padded(most_inputs(shape), 64) : 0; }

// The row of the checkpoint's matrix that output ``lane`` of a panel is; -1 is padding.
int source_row(int panel, int lane, int n, bool pairs) {
    if (!pairs) return panel * PANEL + lane < n ? panel * PANEL + lane : -1;
    const int half = n / 2, at = panel * (PANEL / 2) + lane % (PANEL / 2);
    return at >= half ? -1 : lane < PANEL / 2 ? at : half + at;
}

float* vector_of(const float* from, int n, int room) {
    float* to = (float*)allocate(room * 4L);
    if (to && from) memcpy(to, from, n * 4L);
    return to;
}

template <class T>
void pack(Matrix* matrix, const T* from, int type, bool pairs) {
    const int k = matrix->k, step = type == FLOAT32 ? 1 : type == W8A8 ? 4 : 2, steps = (k + step - 1) / step;
    const int together = type == BFLOAT16 || type == W8A8 ? 1 : type == INT8 ? PANEL / 2 : PANEL;  // outputs of one input
    for (int panel = 0; panel < matrix->panels; panel++) {
        const T* rows[PANEL];
        bool full = type != INT8;  // of what else there is, an output's step is 4 bytes, and all of them lie together
        for (int lane = 0; lane < PANEL; lane++) {
            const int row = source_row(panel, lane, matrix->n, pairs);
            rows[lane] = row < 0 ? nullptr : from + (long)row * k;
            full &= row >= 0;
        }
        T* to = (T*)(matrix->data + panel * matrix->panel_bytes);
        int s = 0;
        for (; full && s < k / step; s++)
            for (int lane = 0; lane < PANEL; lane++, to += step) memcpy(to, rows[lane] + s * step, 4);
        for (; s < steps; s++)
            for (int first = 0; first < PANEL; first += together)
                for (int j = 0; j < step; j++)
                    for (int lane = first; lane < first + together; lane++, to++)
                        *to = rows[lane] && s * step + j < k ? rows[lane][s * step + j] : (T)0;
    }
}

// ``bias`` and ``scale`` [N] float32 or null.
bool make(Matrix* matrix, int n, int k, const void* data, const float* bias, const float* scale, int type, bool pairs) {
    matrix->n = n, matrix->k = k;
    matrix->panels = pairs ? padded(n / 2, PANEL / 2) / (PANEL / 2) : padded(n) / PANEL;
    const int inputs = type == FLOAT32 ? k : padded(k, type == W8A8 ? 4 : 2);
    matrix->panel_bytes = (long)inputs * PANEL * value_bytes(type);
    matrix->data = (char*)allocate(matrix->panel_bytes * matrix->panels);
    if (!matrix->data) return false;
    if (type == FLOAT32)
        pack(matrix, (const uint32_t*)data, type, pairs);
    else if (type == BFLOAT16)
        pack(matrix, (const uint16_t*)data, type, pairs);
    else
        pack(matrix, (const uint8_t*)data, type, pairs);
    if (type == W8A8) {
        matrix->offset = (int32_t*)allocate(matrix->panels * PANEL * 4L);
        if (!matrix->offset) return false;
        for (int j = 0; j < matrix->panels * PANEL; j++) {
            const int row = source_row(j / PANEL, j % PANEL, n, pairs);
            int32_t sum = 0;
            for (long i = 0; row >= 0 && i < k; i++) sum += ((const int8_t*)data)[row * (long)k + i];
            matrix->offset[j] = 128 * sum;
        }
    }
    const float* from[2] = {bias, scale};
    float** to[2] = {&matrix->bias, &matrix->scale};
    for (int i = 0; i < 2; i++) {
        if (!from[i]) continue;
        float* values = *to[i] = (float*)allocate(matrix->panels * PANEL * 4L);
        if (!values) return false;
        for (int j = 0; j < matrix->panels * PANEL; j++) {
            const int row = source_row(j / PANEL, j % PANEL, n, pairs);
            values[j] = row < 0 ? 0 : from[i][row];
        }
    }
    return true;
}

void drop(Matrix* matrix) {
    free(matrix->data);
    free(matrix->bias);
    free(matrix->scale);
    free(matrix->offset);
}

// --- workspace ---------------------------------------------------------------------------------------------------

template <class T>
bool grow(T** buffer, long bytes) {
    free(*buffer);
    return (*buffer = (T*)allocate(bytes)) != nullptr;
}

bool make_room(Model* model, int tokens, int last_rows, int longest, int threads) {
    const Shape& shape = model->shape;
    Workspace& work = model->work;
    const long act = model->variant->activation_bytes(shape.weights), width = padded(shape.width);
    int tile = tokens < MAX_TILE ? tokens : MAX_TILE;
    if (tile > work.tile) {
        tile = tile <= 32 ? 32 : MAX_TILE;
        work.tile = 0;
        const Layer& layer = model->layers[0];
        if (!grow(&work.x, tile * width * 4) || (model->sum && !grow(&work.part, tile * width * 4)) || !grow(&work.qkv, (long)tile * layer.qkv.panels * PANEL * 4) ||
            !grow(&work.normed, tile * width * act) ||
            !grow(&work.attended, tile * padded(shape.heads * shape.head_dim) * act) ||
            !grow(&work.gated, (long)tile * layer.gate_up.panels * (PANEL / 2) * act) ||
            !grow(&work.narrow, tile * narrow_bytes(shape)) || !grow(&work.steps, tile * 4L))
            return false;
        work.tile = tile;
    }
    if (last_rows > work.last_rows) {
        work.last_rows = 0;
        if (!grow(&work.last, last_rows * width * act) || !grow(&work.logits, (long)last_rows * shape.vocab * 4) ||
            !grow(&work.spread, 2L * padded(shape.vocab) * 4))
            return false;
        work.last_rows = last_rows;
    }
    if (longest > work.longest) {
        work.longest = 0;
        for (char*& scratch : work.scratch) free(scratch), scratch = nullptr;
        longest = padded(longest + longest / 4, 256);  // it grows with every token, but not the workspace
        work.scratch_bytes = model->variant->scratch_bytes(&shape, longest);
        work.longest = longest;
    }
    for (int i = 0; i < threads; i++)
        if (!work.scratch[i] && !(work.scratch[i] = (char*)allocate(work.scratch_bytes))) return false;
    return true;
}

// Memory that a call is given for its bookkeeping, freed at its end.
struct Arena {
    char* memory = nullptr;
    long used = 0, room;
    explicit Arena(long bytes) : room(bytes) { memory = (char*)malloc(bytes ? bytes : 1); }
    ~Arena() { free(memory); }
    template <class T>
    T* take(long count) {
        T* mine = (T*)(memory + used);
        used += (count * (long)sizeof(T) + 63) / 64 * 64;
        return mine;
    }
};

int32_t check(const Shape& shape, int vocab, const int64_t* token, const int64_t* position, int tokens) {
    for (int t = 0; t < tokens; t++) {
        if (token[t] < 0 || token[t] >= vocab) return BAD_TOKEN;
        if (position[t] < 0 || position[t] >= shape.positions) return BAD_POSITION;
    }
    return OK;
}

}  // namespace

// What a forward is about, as the Python side lays it out (fly/backends/cpu/library.py: Batch).
struct Batch {
    int32_t rows, tokens;
    const int64_t *token, *position;  // [T]
    const int32_t *start, *count;     // [B]
    const int32_t* tables;            // the rows' pages, one row's behind another's
    const int32_t* table_at;          // [B] where each row's begin
    const uint8_t* const* masks;      // [B] or null
    void *keys, *values;
    int64_t layer_stride;
    int32_t cache_type, page;
    const int32_t* layer;
    int32_t layers;
    int32_t threads;
};

namespace {

int threads_for(int wanted) { return wanted < 1 ? 1 : wanted > MAX_THREADS ? MAX_THREADS : wanted; }

// Everything of a call but its work, for forwards of at most ``tokens``. Returns an error or OK.
int prepare(Call* call, Model* model, const Batch* batch, Arena* arena, int tokens, int last_rows, int extra) {
    memset((void*)call, 0, sizeof(Call));
    if (!arena->memory) return NO_MEMORY;
    if (const int error = check(model->shape, model->tokens, batch->token, batch->position, batch->tokens)) return error;
    call->model = model;
    call->cache = {batch->keys, batch->values, batch->layer_stride, batch->cache_type, batch->page};
    call->rows = batch->rows, call->tokens = batch->tokens;
    call->token = batch->token, call->position = batch->position;
    call->layer = batch->layer, call->layers = batch->layers;
    Row* rows = arena->take<Row>(batch->rows);
    int longest = 0;
    for (int b = 0; b < batch->rows; b++) {
        rows[b] = {batch->tables + batch->table_at[b], batch->masks ? batch->masks[b] : nullptr, batch->start[b],
                   batch->count[b]};
        const int length = batch->start[b] + batch->count[b];
        longest = length > longest ? length : longest;
    }
    call->row = rows;
    call->pieces = arena->take<Piece>(batch->rows);
    if (!make_room(model, tokens, last_rows, longest + extra, threads_for(batch->threads)))
        return NO_MEMORY;
    first_tile(call);
    return OK;
}

// Nanoseconds to wait for workers: an eighth of what a call of ``tokens`` will take, by a rough guess at the processor.
int64_t patience_for(const Model* model, long tokens, long forwards) {
    const Shape& shape = model->shape;
    const long layer = (long)shape.width * (shape.heads + shape.kv_heads) * 2 * shape.head_dim + 3L * shape.width * shape.intermediate;
    const long weights = shape.layers * layer + (long)shape.width * shape.vocab;
    const int64_t guess = weights * forwards / 32 + weights * tokens / 64;
    return 2000 + (guess < 8000000 ? guess : 8000000) / 8;
}

}  // namespace

EXPORT int fly_abi() { return 21; }

// The name of variant ``number``, null behind the last; ``runs`` says whether this processor runs it.
EXPORT const char* fly_variant(int number, int32_t* runs) {
    if (number >= (int)(sizeof(variants) / sizeof(*variants))) return nullptr;
    *runs = runs_here(variants[number]);
    return variants[number]->name;
}

// The sum of ``lines`` · 8 numbers, for how fast they can be read.
EXPORT uint64_t fly_sum(const uint64_t* numbers, int64_t lines, int threads) {
    Reading reading = {};
    reading.from = numbers, reading.lines = lines;
    run(&reading, read_part, threads_for(threads), 1000000);
    return reading.sum;
}

EXPORT void fly_free(Model* model) {
    if (!model) return;
    for (int i = 0; model->layers && i < model->shape.layers; i++) {
        Layer& layer = model->layers[i];
        free(layer.input_norm);
        free(layer.post_norm);
        Matrix* all[] = {&layer.qkv, &layer.o, &layer.gate_up, &layer.down};
        for (Matrix* matrix : all) drop(matrix);
    }
    drop(&model->head);
    void* buffers[] = {model->layers,    model->norm,         model->cos,        model->sin,       model->work.x,
                       model->work.part,
                       model->work.qkv,  model->work.normed,  model->work.attended, model->work.gated, model->work.last,
                       model->work.logits, model->work.spread, model->work.narrow, model->work.steps};
    for (void* buffer : buffers) free(buffer);
    for (char* scratch : model->work.scratch) free(scratch);
    pthread_mutex_destroy(&model->lock);
    free(model);
}

// An empty model, null without memory. ``cos``, ``sin`` [positions, D/2]; ``embedding`` [V, C] must outlive it, or null.
EXPORT Model* fly_new(int variant, const Shape* shape, const float* norm, const float* cos, const float* sin,
                      const void* embedding) {
    Model* model = (Model*)allocate(sizeof(Model));
    if (!model) return nullptr;
    pthread_mutex_init(&model->lock, nullptr);
    const int table = shape->positions * (shape->head_dim / 2);
    model->shape = *shape;
    model->variant = variants[variant];
    model->embedding = embedding;
    model->tokens = shape->vocab;
    model->layers = (Layer*)allocate(shape->layers * (long)sizeof(Layer));
    model->norm = vector_of(norm, shape->width, padded(shape->width));
    model->cos = vector_of(cos, table, table);
    model->sin = vector_of(sin, table, table);
    if (model->layers && model->norm && model->cos && model->sin) return model;
    fly_free(model);
    return nullptr;
}

// Share the model with other processes, before its first call: of all ``tokens`` it holds those from ``first`` on.
EXPORT void fly_share(Model* model, void (*sum)(float*, int64_t), int tokens, int first) {
    model->sum = sum, model->tokens = tokens, model->first_token = first;
}

// The norms of a layer, float32 [C].
EXPORT int fly_set_norms(Model* model, int number, const float* input, const float* post) {
    const int width = model->shape.width;
    model->layers[number].input_norm = vector_of(input, width, padded(width));
    model->layers[number].post_norm = vector_of(post, width, padded(width));
    return model->layers[number].input_norm && model->layers[number].post_norm ? OK : NO_MEMORY;
}

// Matrix ``which`` of a layer (qkv, o, gate_up, down), or the head (4): [N, K] in the type of the weights.
EXPORT int fly_set_matrix(Model* model, int number, int which, int n, int k, const void* data, const float* bias,
                          const float* scale) {
    Matrix* matrix = &model->head;
    if (which < 4) {
        Layer& layer = model->layers[number];
        Matrix* all[] = {&layer.qkv, &layer.o, &layer.gate_up, &layer.down};
        matrix = all[which];
    }
    return make(matrix, n, k, data, bias, scale, model->shape.weights, which == 2) ? OK : NO_MEMORY;
}

// Bytes of a model's workspace at present.
EXPORT int64_t fly_workspace(Model* model) {
    const Shape& shape = model->shape;
    const Workspace& work = model->work;
    const Layer& layer = model->layers[0];
    const long act = model->variant->activation_bytes(shape.weights), width = padded(shape.width);
    int64_t bytes = work.tile * (width * ((model->sum ? 8 : 4) + act) + (long)layer.qkv.panels * PANEL * 4 +
                                 padded(shape.heads * shape.head_dim) * act + (long)layer.gate_up.panels * 16 * act +
                                 narrow_bytes(shape) + 4);
    bytes += work.last_rows * (width * act + shape.vocab * 4L) + (work.last_rows ? 2L * padded(shape.vocab) * 4 : 0);
    for (const char* scratch : work.scratch) bytes += scratch ? work.scratch_bytes : 0;
    return bytes;
}

// Hidden states [T, C] of a batch. Positions and tokens are checked before anything is written.
EXPORT int fly_forward(Model* model, const Batch* batch, void* hidden) {
    Arena arena(batch->rows * (long)(sizeof(Row) + sizeof(Piece)) + 256);
    pthread_mutex_lock(&model->lock);
    Call call;
    const int error = prepare(&call, model, batch, &arena, batch->tokens, 0, 0);
    if (!error && batch->tokens) {
        call.hidden = hidden;
        run(&call, model->variant->forward, threads_for(batch->threads), patience_for(model, batch->tokens, 1));
    }
    pthread_mutex_unlock(&model->lock);
    return error;
}

// Logits [T, V], float32, of hidden states [T, C].
EXPORT int fly_logits(Model* model, const void* hidden, int tokens, float* logits, int threads) {
    if (!tokens) return OK;
    pthread_mutex_lock(&model->lock);
    Call call;
    memset((void*)&call, 0, sizeof(Call));
    call.model = model;
    call.kept_count = tokens;
    call.hidden = (void*)hidden;
    call.logits = logits;
    const int error = make_room(model, tokens, 0, 1, threads = threads_for(threads)) ? OK : NO_MEMORY;
    if (!error) run(&call, model->variant->logits, threads, patience_for(model, tokens, 1) / 8);
    pthread_mutex_unlock(&model->lock);
    return error;
}

// Logits [N, V], float32, behind the tokens of a batch numbered in ``kept`` [N] (null: all), and the most likely token of
// each, the lowest id among equals: a forward and its logits in one call.
EXPORT int fly_score(Model* model, const Batch* batch, const int32_t* kept, int count, float* logits, int32_t* choice) {
    const long value = model->shape.hidden == FLOAT32 ? 4 : 2;
    Arena arena(batch->rows * (long)(sizeof(Row) + sizeof(Piece)) + (long)batch->tokens * model->shape.width * value + 512);
    pthread_mutex_lock(&model->lock);
    Call call;
    const int most = count > batch->tokens ? count : batch->tokens;  // a token may be kept more than once
    const int error = prepare(&call, model, batch, &arena, most, 0, 0);
    if (!error && batch->tokens) {
        call.hidden = arena.take<char>(batch->tokens * model->shape.width * value);
        call.kept = kept, call.kept_count = count;
        call.logits = logits, call.choice = choice;
        run(&call, model->variant->score, threads_for(batch->threads), patience_for(model, batch->tokens, 1));
    }
    pthread_mutex_unlock(&model->lock);
    return error;
}

// What sampling keeps of ``logits`` [B, J, V], float32 (fly/sampling.py: ProcessedDistribution): at each position the largest
// logit, the least that is kept, and ln of the mass kept, [B, J] each; of a row at temperature 0 as at 1.
EXPORT int fly_kept(int variant, const float* logits, int rows, int each, int vocab, const Sampling* how, float* peak,
                    float* least, float* total) {
    float* spread = (float*)allocate(2L * padded(vocab) * 4);
    if (!spread) return NO_MEMORY;
    variants[variant]->kept(logits, rows, each, vocab, how, spread, peak, least, total);
    free(spread);
    return OK;
}

// Which of ``count`` drafted tokens the exact rule keeps (Variant: accepts), by logits [count, V]; -1 without memory.
EXPORT int fly_accepts(int variant, const float* logits, int vocab, const Sampling* how, const int64_t* drafted,
                       int count, const float* distributions, const float* coins, int all, uint8_t* keeps) {
    float* spread = (float*)allocate(2L * padded(vocab) * 4);
    if (!spread) return -1;
    const int first = variants[variant]->accepts(logits, vocab, how, drafted, count, distributions, coins, all, spread, keeps);
    free(spread);
    return first;
}

// The token behind those that stand (Variant: follow), by logits [V]; -1 without memory.
EXPORT int64_t fly_follow(int variant, const float* logits, int vocab, const Sampling* how, int64_t rejected,
                          const float* distribution, float uniform) {
    float* spread = (float*)allocate(2L * padded(vocab) * 4);
    if (!spread) return -1;
    const int64_t token = variants[variant]->follow(logits, vocab, how, rejected, distribution, uniform, spread);
    free(spread);
    return token;
}

namespace {

constexpr uint64_t MIX = 0x9e3779b97f4a7c15, MIX_LAST = 0x94d049bb133111eb;
enum Stream : int { ACCEPT = 0, SAMPLE = 1 };  // fly/sampling.py: Stream

uint64_t scramble(uint64_t x) {  // the finaliser of splitmix64
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * MIX_LAST;
    return x ^ (x >> 31);
}

// ``n`` uniforms of a stream of a round (fly/sampling.py: uniforms).
void uniforms(int64_t seed, int64_t round, int stream, int n, float* uniform) {
    const uint64_t key = scramble(scramble((uint64_t)seed + MIX) + (uint64_t)round * MIX + (uint64_t)stream);
    for (int i = 0; i < n; i++) uniform[i] = (float)(scramble(key + (uint64_t)(i + 1) * MIX) >> 40) * 0x1p-24f;
}

// The seed of a drafter that speculates from ``position`` on (fly/sampling.py: derive).
int64_t derived(int64_t seed, int64_t position) {
    return (int64_t)scramble(scramble((uint64_t)seed ^ MIX_LAST) + (uint64_t)position * MIX);
}

}  // namespace

// Uniforms in [0, 1), [B, n], float32 (fly/sampling.py: uniforms).
EXPORT void fly_uniforms(const int64_t* seed, const int64_t* round, int rows, int stream, int n, float* uniform) {
    for (int b = 0; b < rows; b++) uniforms(seed[b], round[b], stream, n, uniform + (long)b * n);
}

// The ``n`` largest of ``logits`` [V], largest first, then ln of the sum of exp over all; n is 1 to V.
EXPORT void fly_top(int variant, const float* logits, int vocab, int n, float* found) {
    variants[variant]->top(logits, vocab, n, found);
}

// Continuations: row b drafts until limit[b] tokens stand, at least 1 and at most ``most``, or one of its stop ids, or
// up to where it is not ``sure``. All but the last (there, all) are then stored, so the rows' pages must have room for
// count[b] + limit[b] - 1 new tokens. Tokens are the most likely ones where ``sampling`` is null; else drawn by
// ``uniform`` from what ``distributions`` [B, most, V] shows then, with zeros behind the last. They are the same with a ``lookup``
// (or null), which copies from ``texts``: of each row the start[b] tokens that are stored. New tokens are causal, at the
// positions behind those.
EXPORT int fly_draft(Model* model, const Batch* batch, int most, const int32_t* limit, const int64_t* stop,
                     const int32_t* stop_at, int64_t* drafted, int32_t* drafted_count, const Sampling* sampling,
                     const float* uniform, float* distributions, Lookup* lookup, const int32_t* const* texts, const Sure* sure) {
    const int rows = batch->rows;
    long copies = !lookup ? 0 : (long)rows * (lookup->most < most ? lookup->most : most);
    copies = copies < MAX_COPIES ? copies : MAX_COPIES;
    const long tokens = batch->tokens + copies;
    long text = 0;
    for (int b = 0; b < rows; b++) text += batch->start[b] + batch->count[b] + limit[b];
    Arena arena(rows * (long)(2 * sizeof(Row) + sizeof(Piece) + 3 * 4 + 8) + tokens * 16 + text * 4 + 1024);
    pthread_mutex_lock(&model->lock);
    Call call;
    int error = prepare(&call, model, batch, &arena, (int)tokens, rows + (int)copies, most);
    for (int b = 0; !error && b < rows; b++)
        if (batch->start[b] + batch->count[b] + limit[b] - 1 > model->shape.positions) error = BAD_POSITION;
    if (!error && rows) {
        call.most = most, call.limit = limit, call.stop = stop, call.stop_at = stop_at;
        call.drafted = drafted, call.drafted_count = drafted_count;
        call.sampling = sampling, call.uniform = uniform, call.distributions = distributions;
        call.lookup = lookup;
        call.sure = *sure;
        call.live = arena.take<Row>(rows);
        call.live_row = arena.take<int32_t>(rows);
        call.matched = arena.take<int32_t>(rows);
        call.kept_at = arena.take<int32_t>(rows + 1);
        call.text = arena.take<int32_t*>(rows);
        call.live_token = arena.take<int64_t>(tokens);
        call.live_position = arena.take<int64_t>(tokens);
        int32_t* end = arena.take<int32_t>(text);
        const int64_t* token = batch->token;
        for (int b = 0; b < rows; b++) {
            call.live[b] = call.row[b];
            call.live_row[b] = b;
            drafted_count[b] = 0;
            call.text[b] = end;
            if (lookup) memcpy(end, texts[b], batch->start[b] * sizeof(int32_t));
            end += batch->start[b];
            for (int n = 0; n < batch->count[b]; n++) *end++ = (int32_t)*token++;
            end += limit[b];
        }
        call.row = call.live;
        call.live_rows = rows;
        run(&call, model->variant->draft, threads_for(batch->threads),
            patience_for(model, batch->tokens + (long)rows * most, most));
        const long vocab = model->shape.vocab;
        for (int b = 0; sampling && b < rows; b++)
            memset(distributions + ((long)b * most + drafted_count[b]) * vocab, 0, (most - drafted_count[b]) * vocab * 4);
    }
    pthread_mutex_unlock(&model->lock);
    return error;
}

// A condition of those that together excuse a mismatch at temperature 0.
struct Clause {
    int32_t kind, negated, count;
    double theta;
};

enum ClauseKind : int32_t { ENTROPY = 0, WINDOW = 1, ROOM = 2, CONTROL = 3 };

// What they said of one: a bit each in ``held``; and -ln of the target's probability of the drafted token.
struct Ask {
    int32_t row, round, position;
    uint32_t held;
    int32_t excused;
    double nats;
};

// A row of several rounds (fly/backends/cpu/library.py: Going).
struct Going {
    int32_t length, room;         // tokens of the row; how many its pages hold
    int32_t left;                 // tokens it may still emit
    int32_t k, context;           // tokens drafted a round, and the longest text drafted for
    int32_t draft_start;          // tokens that the drafter has stored, in and out
    int32_t clause_at, clauses;   // of all: what excuses what the exact rule does not keep, where all hold
    int64_t seed;
    int64_t* text;                // [room + 1] the row's tokens, in and out
    int32_t* copied;              // [room + 1] the tokens for a lookup, or null
};

// Rounds of some rows: what goes in, and where it comes to (fly/backends/cpu/library.py: Rounds).
struct Rounds {
    Going* going;               // [B]; ``length`` and ``left`` are out as before the last round
    int32_t k, most;            // the most tokens that any row drafts a round; rounds
    const int64_t* stop;        // ids that end a row, those of row b from stop_at[b] to stop_at[b + 1]
    const int32_t* stop_at;
    const int32_t* hurry;       // no further round begins while this is not 0; or null
    int64_t nanoseconds;        // nor after these,
    int64_t plain, spare;       // nor when those after the first took ``spare`` more than their tokens are worth, ``plain``
                                // each (0: never)
    float* logits;              // [B · (k + 1), V] out, of the last round, one row's behind another's
    int64_t* drafted;           // [B, most, k] out
    int32_t* drafted_count;     // [B, most] out
    int32_t* choice;            // [B, most, k + 1] out: the target's most likely tokens
    int32_t* accepted;          // [B, most] out: drafted tokens that stand
    int64_t* following;         // [B, most] out: the token behind them
    const Sampling* sampling;   // [B] how rows draw; null where all take the most likely
    float* distributions;                // [B, k, V] out: what the last round's drafts were drawn from; null where they were not
    float* spread;              // [2, V padded] for what is drawn
    int32_t variant;            // which of them judges what is drawn, and what a clause asks
    const Clause* clause;
    const uint8_t* control;     // [V] which tokens are control tokens
    Ask* ask;                   // [most_asks] out
    int32_t most_asks, asks;
    void (*decide)(int32_t);    // of a row alone, asked of a round by its number, if the exact rule keeps not all of its
                                // draft; null is the exact rule. It sets what follows, and
    int32_t* stands;            // how many stand; -1 is the end of the row, and UNANSWERED that it said nothing
    int32_t rounds;             // out
    int64_t elapsed[2], scoring[2], drafting[2];  // out: nanoseconds in all, in the target and in the drafter, of the
                                                  // first round and of the others
    Sure sure;                  // of the drafter
};

constexpr int32_t UNANSWERED = -2;

namespace {

// Drafted tokens of row ``b`` that stand from the mismatch at ``n`` on: those that the clauses excuse, and those that
// match.
int excuse(Rounds* it, int b, const float* all_logits, int vocab, const int64_t* drafted, const int32_t* choice, int n,
           int drafts) {
    const Clause* clauses = it->clause + it->going[b].clause_at;
    const int count = it->going[b].clauses;
    while (n < drafts) {
        const float* logits = all_logits + (long)n * vocab;
        float top[4];
        const int best = vocab < 3 ? vocab : 3;
        variants[it->variant]->top(logits, vocab, best, top);
        const double total = top[best], logit = logits[drafted[n]];
        uint32_t held = 0;
        for (int c = 0; c < count; c++) {
            const Clause& clause = clauses[c];
            bool yes = false;
            if (clause.kind == ENTROPY) {  // as ``EntropyGate.at``
                double entropy = 0;
                for (int i = 0; i < best; i++)
                    if (top[i] > -__builtin_inff()) entropy -= exp(top[i] - total) * (top[i] - total);
                yes = entropy >= clause.theta;
            } else if (clause.kind == WINDOW) {
                yes = n + clause.count < drafts;
                for (int i = n + 1; yes && i <= n + clause.count; i++) yes = drafted[i] == choice[i];
            } else if (clause.kind == ROOM) {
                yes = n + 1 + clause.count <= drafts;
            } else {
                yes = it->control[drafted[n]];
            }
            held |= (uint32_t)(yes != (bool)clause.negated) << c;
        }
        const bool all = held == (uint32_t)((1ull << count) - 1), excused = all && logit != -__builtin_inf();
        it->ask[it->asks++] = {b, it->rounds - 1, n, held, excused, total - logit};
        if (!excused) break;
        for (n++; n < drafts && drafted[n] == choice[n];) n++;
    }
    return n;
}

bool ends(const Rounds* it, int b, int64_t token) {
    bool found = false;
    for (int s = it->stop_at[b]; s < it->stop_at[b + 1]; s++) found |= it->stop[s] == token;
    return found;
}

// The arrays of a forward over some of the rows of ``of``, whose rows are filled in one by one.
struct Packed {
    Batch batch;
    int32_t *start, *count, *table_at, *row;
    int64_t *token, *position;
    const int32_t* all_tables;

    static long bytes(long rows, long tokens) { return rows * 4 * 4 + tokens * 16 + 6 * 64; }

    Packed(Arena* arena, const Batch* of, long tokens) : batch(*of), all_tables(of->table_at) {
        batch.start = start = arena->take<int32_t>(of->rows), batch.count = count = arena->take<int32_t>(of->rows);
        batch.table_at = table_at = arena->take<int32_t>(of->rows), row = arena->take<int32_t>(of->rows);
        batch.token = token = arena->take<int64_t>(tokens), batch.position = position = arena->take<int64_t>(tokens);
        clear();
    }

    void clear() { batch.rows = batch.tokens = 0; }

    // The tokens ``from`` to ``to`` of row ``b``.
    void add(int b, const int64_t* text, int from, int to) {
        const int i = batch.rows++;
        row[i] = b, start[i] = from, count[i] = to - from, table_at[i] = all_tables[b];
        for (int at = from; at < to; at++) token[batch.tokens] = text[at], position[batch.tokens++] = at;
    }
};

}  // namespace

// Rounds of the rows of ``batch``, which the target has stored but for their last tokens: draft, verify, emit, again and
// again, until a row emits a stop id or all that is left of it, its room may not do, or the time is over. Without a
// ``drafter`` a ``lookup`` drafts what followed the last time, with neither nobody does.
EXPORT int fly_rounds(Model* target, const Batch* batch, Model* drafter, const Batch* draft_batch, Lookup* lookup,
                      Rounds* it) {
    const int64_t begin = nanoseconds();
    const int rows = batch->rows, vocab = target->shape.vocab, k = it->k;
    const Variant* judge = variants[it->variant];
    const long new_tokens = rows * (long)(k + 1);
    long late = 0;
    for (int b = 0; drafter && b < rows; b++) late += it->going[b].length - it->going[b].draft_start + k + 1;
    const long stops = it->stop_at[rows];
    Arena arena(Packed::bytes(rows, new_tokens) + Packed::bytes(rows, late) + rows * 64L + stops * 8 +
                new_tokens * (8 + 4 + 4) + rows * 8L + 20 * 64);
    if (!arena.memory) return NO_MEMORY;
    Packed scored(&arena, batch, new_tokens), draft(&arena, drafter ? draft_batch : batch, late);
    int32_t* limit = arena.take<int32_t>(rows);
    int32_t* drafts = arena.take<int32_t>(rows);    // of each row
    int32_t* proposed = arena.take<int32_t>(rows);  // of each row drafted for
    int32_t* stop_at = arena.take<int32_t>(rows + 1);
    int64_t* stop = arena.take<int64_t>(stops);
    int64_t* chain = arena.take<int64_t>(new_tokens);
    int32_t* choice = arena.take<int32_t>(new_tokens);
    float* coins = arena.take<float>(new_tokens);
    Sampling* drawing = arena.take<Sampling>(rows);
    const int32_t** texts = arena.take<const int32_t*>(rows);
    it->rounds = it->asks = 0;
    for (int i = 0; i < 2; i++) it->elapsed[i] = it->scoring[i] = it->drafting[i] = 0;
    auto drafted_of = [it](int b) { return it->drafted + ((long)b * it->most + it->rounds) * it->k; };
    for (int64_t now = begin, from, since, spare = it->spare;;) {
        from = now;
        const int32_t round = it->rounds, later = round > 0;
        int32_t longest = 0;
        draft.clear();
        for (int b = 0; b < rows; b++) {
            const Going& row = it->going[b];
            int32_t most = row.k < row.left - 1 ? row.k : row.left - 1;
            most = most < row.context - row.length ? most : row.context - row.length;
            drafts[b] = 0;
            if (most <= 0) continue;
            if (drafter) {
                const int i = draft.batch.rows;
                draft.add(b, row.text, row.draft_start, row.length);
                texts[i] = row.copied;
                limit[i] = most, longest = longest > most ? longest : most;
            } else if (lookup && target->variant->look_up(*lookup, row.copied, row.length, most)) {
                int64_t* drafted = drafted_of(b);
                for (bool ended = false; drafts[b] < most && !ended; drafts[b]++) {
                    const int at = drafts[b];
                    drafted[at] = row.text[row.length + at] = row.copied[row.length + at];
                    ended = ends(it, b, drafted[at]);
                }
            }
        }
        const int asked = draft.batch.rows;
        if (asked) {
            stop_at[0] = 0;
            for (int i = 0; i < asked; i++) {
                const int b = draft.row[i];
                stop_at[i + 1] = stop_at[i];
                for (int s = it->stop_at[b]; s < it->stop_at[b + 1]; s++) stop[stop_at[i + 1]++] = it->stop[s];
                if (!it->sampling) continue;
                const int64_t seed = derived(it->going[b].seed, it->going[b].length);
                drawing[i] = it->sampling[b];
                for (int n = 0; n < limit[i]; n++)
                    uniforms(seed, it->going[b].length + n, SAMPLE, 1, coins + i * longest + n);
            }
            if (const int error = fly_draft(drafter, &draft.batch, longest, limit, stop, stop_at, chain, proposed,
                                            it->sampling ? drawing : nullptr, coins, it->distributions, lookup, texts, &it->sure))
                return error;
            for (int i = 0; i < asked; i++) {
                const int b = draft.row[i], n = drafts[b] = proposed[i];
                Going& row = it->going[b];
                const int64_t* tokens = chain + i * longest;
                // else the drafter was not sure of what comes behind the last, and has that stored
                const bool whole = n == limit[i] || (n && ends(it, b, tokens[n - 1]));
                row.draft_start = row.length + n - whole;
                memcpy(drafted_of(b), tokens, n * sizeof(int64_t));
                memcpy(row.text + row.length, tokens, n * sizeof(int64_t));
            }
        }
        since = now, now = nanoseconds();
        if (asked || lookup) it->drafting[later] += now - since;
        scored.clear();
        for (int b = 0; b < rows; b++) {
            const Going& row = it->going[b];
            scored.add(b, row.text, row.length - 1, row.length + drafts[b]);
        }
        if (const int error = fly_score(target, &scored.batch, nullptr, scored.batch.tokens, it->logits, choice)) return error;
        since = now, it->scoring[later] += (now = nanoseconds()) - since;
        it->rounds++;
        bool over = it->rounds == it->most;
        int emitted = 0;
        for (int b = 0, at = 0, i = 0; b < rows; at += drafts[b] + 1, b++) {
            Going& row = it->going[b];
            const long place = (long)b * it->most + round;
            const int64_t* drafted = it->drafted + place * k;
            const float* logits = it->logits + (long)at * vocab;
            const bool draws = it->sampling && it->sampling[b].temperature > 0;
            const float* distributions = nullptr;
            if (i < asked && draft.row[i] == b) distributions = it->distributions ? it->distributions + (long)i * longest * vocab : nullptr, i++;
            memcpy(it->choice + place * (k + 1), choice + at, (drafts[b] + 1) * sizeof(int32_t));
            int32_t n = 0;
            if (draws) {
                uniforms(row.seed, row.length, ACCEPT, drafts[b], coins);
                n = judge->accepts(logits, vocab, it->sampling + b, drafted, drafts[b], distributions, coins, false, it->spread,
                                   nullptr);
            } else {
                while (n < drafts[b] && drafted[n] == choice[at + n]) n++;
            }
            it->drafted_count[place] = drafts[b];
            if (n < drafts[b] && it->decide) {
                *it->stands = UNANSWERED;
                it->decide(round);
                n = *it->stands;
            } else if (!draws) {
                if (n < drafts[b] && row.clauses) n = excuse(it, b, logits, vocab, drafted, choice + at, n, drafts[b]);
                it->following[place] = choice[at + n];
            } else {
                uniforms(row.seed, row.length, SAMPLE, 1, coins);
                it->following[place] = judge->follow(logits + (long)n * vocab, vocab, it->sampling + b,
                                                     n < drafts[b] ? drafted[n] : -1,
                                                     distributions ? distributions + (long)n * vocab : nullptr, coins[0], it->spread);
            }
            over |= n < 0 || n + 1 >= row.left;
            const int32_t next = row.left - n - 2;  // drafted in the next round, at most
            over |= row.length + n + 1 + (row.k < next ? row.k : next) > row.room;
            it->accepted[place] = n;
            if (n >= 0) row.text[row.length + n] = it->following[place];
            for (int32_t t = row.length; t <= row.length + n; t++) over |= ends(it, b, row.text[t]);
            emitted += n + 1;
        }
        now = nanoseconds();
        it->elapsed[later] += now - from;
        if (later) spare += emitted * it->plain - (now - from);  // the first may take longer, for being that
        over |= now - begin >= it->nanoseconds || (it->plain && spare < 0);
        over |= it->clause && it->asks + (int)new_tokens > it->most_asks;
        over |= it->hurry && __atomic_load_n(it->hurry, __ATOMIC_RELAXED);
        if (over) return OK;
        for (int b = 0; b < rows; b++) {
            Going& row = it->going[b];
            const int32_t n = it->accepted[(long)b * it->most + round], before = row.length;
            row.length += n + 1, row.left -= n + 1;
            if (row.draft_start > before + n) row.draft_start = before + n;
            for (int32_t t = before; row.copied && t < row.length; t++) row.copied[t] = (int32_t)row.text[t];
        }
    }
}

// What all sources share: a packed model, a call over it, and the table of a variant's code. Knows nothing of
// instructions, and nothing of where memory and threads come from.
//
// Plain C++17 without exceptions and without the standard library: the variants are compiled for processors that may
// not be the one at hand, and a template of the library instantiated in one of them could be linked in for all.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <time.h>

#include "interface.h"

#ifdef __SANITIZE_ADDRESS__  // what lies between two pieces of an arena belongs to nobody
#include <sanitizer/asan_interface.h>
#define KEEP_OFF(base, at, bytes) (base ? __asan_poison_memory_region(at, bytes) : (void)0)
#define APART 64
#else
#define KEEP_OFF(base, at, bytes) (void)0
#define APART 0
#endif

#define UNROLL _Pragma("GCC unroll 16")
#define NOINLINE __attribute__((noinline))  // what needs all registers to itself

namespace fly {

constexpr int PANEL = 32;       // outputs of a matrix that lie together
constexpr int MAX_TILE = 256;   // packed tokens that go through all layers at once
constexpr int MAX_COPIES = 256; // tokens of a drafter's forward that a lookup copied
constexpr int MAX_THREADS = 64;
constexpr int MOST = 1 << 30;          // of anything that is counted, so that sums of two are numbers
constexpr int64_t BEYOND = 1LL << 62;  // bytes that nothing has

// How the values of a panel lie: those of ``step`` inputs output by output, or (``together``) some outputs of one input
// after the same outputs of the next.
struct Layout {
    int step, together;
};

static constexpr Layout layout_of(int type) {
    constexpr Layout layouts[] = {{1, PANEL}, {2, 1}, {2, PANEL / 2}, {4, 1}, {4, 1}};  // by Type
    return layouts[type];
}

// How a strip of a GROUPED matrix stores its weights. A weight is scale · number + minimum, with the scale and the minimum
// of its group; numbers are unsigned.
struct Format {
    int8_t bits;     // of a number: 4 or 8
    int8_t group;    // inputs of a group: 16 or 32
    uint8_t centre;  // the minimum is -centre · scale; 0: each group has a minimum of its own
    bool parts;      // scales (and minima) are whole numbers times a factor of the superblock; else they are float16
};

// 16 outputs of a GROUPED matrix, half a panel: superblocks of SUPER inputs one after another, the last one maybe shorter.
// A superblock is a head, padded to 64 bytes, and then its numbers:
// - head: float16 factor [16], and of minima [16] (``parts`` only); scale [groups, 16]; minimum [groups, 16] (none with a
//   centre). Scales and minima are int8 with ``parts``, else float16.
// - numbers: [steps of 4 inputs, 16 outputs, 4 inputs], one byte each. With 4 bits, a byte's upper half belongs to the next
//   step, so that 64 bytes are two steps. (4 inputs by 16 outputs are what both a vector and a tile instruction take.)
struct Strip {
    const char* data;
    Format format;
};
constexpr int STRIP = PANEL / 2, SUPER = 256, GROUP = 32;  // GROUP: inputs that are rounded together, on either side

static inline int groups_of(Format format, int inputs) { return (inputs + format.group - 1) / format.group; }

// Bytes of the head of a superblock of so many groups.
static inline long head_bytes(Format format, int groups) {
    const long kinds = format.centre ? 1 : 2, factors = format.parts ? kinds * STRIP * 2 : 0;
    return (factors + kinds * groups * STRIP * (format.parts ? 1 : 2) + 63) / 64 * 64;
}

// W of x·Wᵀ, in panels of 32 outputs; within a panel, all outputs of one step of inputs lie together.
struct Matrix {
    char* data;
    long panel_bytes;
    int n, k, panels;
    float* bias;      // [panels · 32] or null
    float* scale;     // [panels · 32], int8 and W8A8: the weight is scale · data
    int32_t* offset;  // [panels · 32], W8A8: 128 · the sum of an output's data
    Strip* strips;    // [2 · panels], GROUPED; they lie in ``data`` one after another, ``panel_bytes`` on average
};

// Norms of a layer: before attention and feed-forward, after each (or null), of queries and of keys (or null).
// FEATURE is a draft head's, whose attention takes an embedding and a feature.
enum Norm { ATTENTION_IN, MLP_IN, ATTENTION_OUT, MLP_OUT, QUERY, KEY, FEATURE, NORMS };

struct Layer {
    float* norm[NORMS];            // [C padded], of queries and of keys [D padded]
    Matrix qkv, o, gate_up, down;  // the panels of gate_up hold 16 gates and their 16 ups
    int32_t window;                // stored tokens that a token sees, the last ones up to itself; 0 is all
    int32_t rope;                  // which of the tables
};

// Bytes of so many values, as a product of sizes; -1 if one is less than 0, or beyond all bounds.
template <class T, class... Sizes>
static ALWAYS_INLINE int64_t bytes_of(Sizes... sizes) {
    const int64_t all[] = {(int64_t)sizes..., sizeof(T)};
    int64_t bytes = 1;
    for (const int64_t size : all)
        if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) return -1;
    return bytes < BEYOND ? bytes : -1;
}

// Deals out ``size`` bytes piece by piece, each at a multiple of 64. Without a ``base`` it counts what that takes. What is
// beyond the end is nowhere: it ``failed`` then (library.h: lay_out).
struct Dealer {
    char* base;
    int64_t size, used;
    bool failed;

    template <class T, class... Sizes>
    ALWAYS_INLINE Span<T> take(Sizes... sizes) {
        const int64_t bytes = bytes_of<T>(sizes...), room = (bytes + 63) / 64 * 64 + APART;
        if (bytes < 0 || room > size - used) {
            failed = true;
            return {};
        }
        const Span<T> mine = {base ? (T*)(base + used) : nullptr, bytes};
        KEEP_OFF(base, base + used + bytes, room - bytes);
        used += room;
        return mine;
    }
};

struct Block {
    char* memory;
    int64_t bytes;
};

// Buffers of one tile. Everything is padded to 32 values with zeros, which stay zeros.
struct Workspace {
    Block of_tile;
    int tile;         // tokens they are for
    float* x;         // [T, C] the residual stream
    float* part;      // [T, C] what is added to it, where other processes add theirs, or it is normalised first
    float* qkv;       // [T, (H + 2G)·D]
    void* normed;     // [T, C], in the type of activations; [T, 2C] of a head
    float* embedded;  // [T, C] of a head
    void* given;      // [T, F] of a head, in the type of activations
    void* attended;   // [T, H·D]
    void* gated;      // [T, intermediate]
    uint8_t* narrow;  // [T, the most inputs of a matrix] of W8A8, 128 above what it stands for, and GROUPED; padded to 64
    float* steps;     // [T] of W8A8: what is 1 there; [T, ``steps_of``] of GROUPED
    Block of_last;
    int last_rows;    // rows that the following are for
    void* last;       // [rows, C], what the logits of a drafter's step are made from
    float* logits;    // [rows, V]
    float* spread;    // [2, V padded], of one row
    float* carried;   // [rows, C] of a head: the features of a step's last tokens
    int longest;      // stored tokens that the following are for
    Block scratch[MAX_THREADS];  // of each thread's own
};

struct Variant;

struct Model {
    Shape shape;
    const Variant* variant;
    Layer* layers;
    float* norm;
    Matrix head;
    Matrix fuse;             // of a draft head: from hidden states of the target to a feature
    const int64_t* target;   // of a draft head: the target's ids of its own, its owner's
    Span<const char> embedding;  // [V, C], its owner's; null where the head's panels serve as well
    int32_t embedding_kind;      // of the blocks that the embedding is stored in (interface.h: Stored); 0: plain numbers
    // Where several processes share a model, each holds a part of every matrix and ``shape.vocab`` of all ``tokens``,
    // from ``first_token`` on; ``sum`` adds up ``count`` values over the processes, in place. Null is one process.
    void (*sum)(float* values, int64_t count);
    int32_t tokens, first_token;
    float *cos, *sin;  // [ropes, positions, D/2]
    Workspace work;
    pthread_mutex_t lock;  // of the workspace
};

// One sequence of a call: ``count`` new tokens after ``start`` stored ones.
struct Row {
    const int32_t* table;  // its pages
    const uint8_t* mask;   // [count, start + count], what each new token sees; null is causal
    int32_t start, count;
};

// Part of a row in a tile: its new tokens ``from`` to ``to``, packed from ``at`` on.
struct Piece {
    int32_t row, from, to, at;
};

struct Barrier {
    alignas(64) int32_t arrived;
    alignas(64) int32_t phase;
};

// To hidden states, from there to logits, both, a drafter's loop, or what the vocabulary is fed as.
enum Job { FORWARD, LOGITS, SCORE, DRAFT, EMBED };

// The batch it begins with, of which a drafter's loop replaces rows and tokens step by step; ``threads`` are those that came.
struct Call : Batch {
    Job job;
    Model* model;
    Row* row;             // [B], of a drafter's loop those of the current step
    void* hidden;         // [T, C] in or out
    float* logits;        // [T, V] out, of all tokens or of those that are kept
    const int32_t* kept;  // [N] their numbers; null is all
    int32_t kept_count;
    int32_t* choice;      // [N] out: the most likely token of each, NO_NUMBER where the logits are NaN; or null
    const int32_t* state;   // [states] give the residual stream after so many layers each
    int32_t states;
    void* read;             // [T, states · C] out
    const void* given;      // [T, F] of a draft head's first forward, in the type of hidden states; null is the ``carried``
    // a drafter's loop
    int32_t most;           // columns of ``drafted``
    const int32_t* limit;   // [B] tokens to draft at most
    const Span<const int64_t>* stop;  // [B] ids that end a row
    int64_t* drafted;       // [B, most] out
    int32_t* drafted_count; // [B] out
    float* reached;         // [B] product of the largest probabilities so far
    const Sampling* sampling;  // [B]; null where every row takes the most likely
    const float* uniform;      // [B, most] in [0, 1)
    float* distributions;      // [B, most, V] out: what each token was drawn from
    Lookup* lookup;            // null looks up nothing
    const Sure* sure;          // [B]
    // shared by the threads
    Piece* pieces;   // [B]
    int32_t piece_count, tile_tokens, tile_at;
    int32_t* live_row;   // [B] numbers of the rows of the current step
    int64_t *live_token, *live_position;  // [T]
    int32_t live_rows;
    int32_t** text;      // [B] all tokens of each row (those stored only for a lookup), with room for what is drafted
    int32_t* matched;    // [B] of the live rows: tokens found again; copies of what followed lie after the text
    int32_t* carried_at; // [B] of the live rows: their place in the forward before
    int32_t* kept_at;    // [B + 1] where the logits of each live row begin: of its last token, and of each copy fed
    alignas(64) int32_t taken;  // panels of the product under way that somebody works on
    alignas(64) int64_t stalled;  // nanoseconds of waiting for somebody unduly long
    Barrier barrier;
};

// The code for one kind of processor; what the functions do is said in decoder.h, sampling.h and lookup.h.
struct Variant {
    const char* name;
    int (*activation_bytes)(int weights);  // of one value that goes into a product
    void (*lay_scratch)(Dealer& from, const Shape*, int longest);  // all that a thread has of its own
    void (*work)(Call*, int thread);  // the call's job
    void (*top)(const float* logits, int vocab, int n, float* found);
    void (*kept)(const float* logits, int rows, int each, int vocab, const Sampling* how, float* spread, float* peak,
                 float* least, float* total);
    int (*accepts)(const float* logits, int vocab, const Sampling* how, const int64_t* drafted, int count,
                   const float* distributions, const float* coins, bool all, float* spread, uint8_t* keeps);
    int64_t (*follow)(const float* logits, int vocab, const Sampling* how, int64_t rejected, const float* distribution,
                      float uniform, float* spread);
    int (*siblings)(const float* logits, int vocab, const Sampling* how, const int64_t* tokens, const float* coins, int count,
                    float uniform, float* spread, int64_t* next);
    int (*look_up)(const Lookup& lookup, int32_t* text, int length, int most);
};

extern const Variant avx512bf16, avx512, avx2;

// Reads a row of blocks of a ``kind`` that is known (blocks.cpp).
void read_row(int kind, const char* blocks, int width, float* to);

static inline int padded(int n, int to = PANEL) { return (n + to - 1) / to * to; }
template <class T>
static ALWAYS_INLINE T least_of(T a, T b) { return a < b ? a : b; }
template <class T>
static ALWAYS_INLINE T most_of(T a, T b) { return a > b ? a : b; }

// Inputs of the widest matrix.
static inline int most_inputs(const Shape& shape) {
    return most_of(most_of(shape.width, shape.heads * shape.head_dim), shape.intermediate);
}

// Whether what a matrix is multiplied with is rounded to 8 bits, and the floats that go with each row of it then.
static inline bool narrows(const Shape& shape) { return shape.weights == W8A8 || shape.weights == GROUPED; }
static inline int steps_of(const Shape& shape) {
    return shape.weights == GROUPED ? 4 * (padded(most_inputs(shape), GROUP) / GROUP) : 1;  // groups.h: GroupedRow
}

static inline int bytes_of_type(int type) { return type == FLOAT32 ? 4 : type == BFLOAT16 ? 2 : 1; }

// Whether what a layer adds to the residual stream is put aside first.
static inline bool adds_apart(const Model* model) { return model->sum || model->layers[0].norm[ATTENTION_OUT]; }

static inline int64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static inline void pause() { __builtin_ia32_pause(); }

// Bring a line of memory into the second level of the caches, or into the first. Not by the builtin: GCC takes what only
// calls that for free of effects, and drops it.
static inline void fetch(const void* at) { asm volatile("prefetcht1 (%0)" ::"r"(at)); }
static inline void fetch_close(const void* at) { asm volatile("prefetcht0 (%0)" ::"r"(at)); }

// The next tile, the first after a call is set to zeros: as many new tokens as fit, of as many rows as they are of.
static inline void next_tile(Call* call) {
    int row = 0, from = 0;
    if (call->piece_count) {
        const Piece& last = call->pieces[call->piece_count - 1];
        row = last.row, from = last.to;
        if (from == call->row[row].count) row++, from = 0;
    }
    call->tile_at += call->tile_tokens;
    call->tile_tokens = call->piece_count = 0;
    for (; row < call->rows && call->tile_tokens < MAX_TILE; row++, from = 0) {
        const int count = least_of(call->row[row].count - from, MAX_TILE - call->tile_tokens);
        call->pieces[call->piece_count++] = {row, from, from + count, call->tile_tokens};
        call->tile_tokens += count;
    }
}

}  // namespace fly

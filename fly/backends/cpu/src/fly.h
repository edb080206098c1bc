// Shared by all sources: a packed model, a call of it, and the table of a variant's code. Knows nothing of
// instructions, nor of where memory and threads come from.
//
// Plain C++17, without exceptions and without the standard library. Variants are compiled for processors that may not
// be this one, and the linker could pick a variant's copy of a library template for all sources.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <time.h>

#include "interface.h"

#ifdef __SANITIZE_ADDRESS__  // the bytes between two pieces of an arena must not be touched
#include <sanitizer/asan_interface.h>
#define KEEP_OFF(base, at, bytes) (base ? __asan_poison_memory_region(at, bytes) : (void)0)
#define APART 64
#else
#define KEEP_OFF(base, at, bytes) (void)0
#define APART 0
#endif

#define UNROLL _Pragma("GCC unroll 16")
#define NOINLINE __attribute__((noinline))  // for functions that need all registers

namespace fly {

constexpr int PANEL = 32;       // outputs of a matrix that are stored together
constexpr int MAX_TILE = 256;   // packed tokens that go through all layers at once
constexpr int MAX_COPIES = 256; // the most copied tokens in a drafter's forward
constexpr int MAX_THREADS = 64;
constexpr int MAX_COUNT = 1 << 30;          // the upper bound of any count, so that two can be added
constexpr int64_t BEYOND = 1LL << 62;  // more bytes than there can be

// The order of values in a panel: step after step, and in each step output after output. A step is ``step`` inputs of an
// output, in 4 bytes. Inputs are padded with zeros to a multiple of ``whole``. Vector and tile instructions read the same
// panels, and 16 steps fill a tile (amx.cpp).
struct Layout {
    int step, whole;
};

static constexpr Layout layout_of(int type) {
    constexpr Layout layouts[] = {{1, 1}, {2, 32}, {4, 64}, {4, 4}};  // by Type
    return layouts[type];
}

// How a strip of a GROUPED matrix stores its weights. A weight is scale · number + minimum, with the scale and minimum of its
// group. Numbers are unsigned.
struct Format {
    int8_t bits;     // bits of a number: 4 or 8
    int8_t group;    // inputs of a group: 16 or 32
    uint8_t centre;  // the minimum is -centre · scale; 0: each group has a minimum of its own
    bool parts;      // scales (and minima) are whole numbers times the superblock's factor; else float16
};

// 16 outputs of a GROUPED matrix, half a panel. They are stored in superblocks of SUPER inputs; the last one may be
// shorter. A superblock is a head, padded to 64 bytes, and then its numbers:
// - head: float16 factors of scales [16] and of minima [16] (``parts`` only); scales [groups, 16]; minima [groups, 16]
//   (none with a centre). Scales and minima are int8 with ``parts``, else float16.
// - numbers: [steps of 4 inputs, 16 outputs, 4 inputs], one byte each. With 4 bits, a byte's upper half belongs to the
//   next step, so that 64 bytes hold two steps. (Vector and tile instructions both take 4 inputs by 16 outputs.)
struct Strip {
    const char* data;
    Format format;
};
constexpr int STRIP = PANEL / 2, SUPER = 256, GROUP = 32;  // GROUP: inputs that share a scale, in a matrix and in activations

static inline int padded(int n, int to = PANEL) { return (n + to - 1) / to * to; }

static inline int groups_of(Format format, int inputs) { return (inputs + format.group - 1) / format.group; }

// Bytes of the head of a superblock with ``groups`` groups.
static inline long head_bytes(Format format, int groups) {
    const long kinds = format.centre ? 1 : 2, factors = format.parts ? kinds * STRIP * 2 : 0;
    return (factors + kinds * groups * STRIP * (format.parts ? 1 : 2) + 63) / 64 * 64;
}

// The matrix W of x·Wᵀ, in panels of 32 outputs. Within a panel, all outputs of one step of inputs lie together.
struct Matrix {
    char* data;
    long panel_bytes;
    int n, k, panels;
    float* bias;      // [panels · 32] or null
    float* scale;     // [panels · 32], W8A8: the weight is scale · data
    int32_t* offset;  // [panels · 32], W8A8: 128 · the sum of an output's data
    Strip* strips;    // [2 · panels], GROUPED; they lie in ``data`` one after another, ``panel_bytes`` on average
};

// A head in one bit a weight (logits.h: project_likely), for 64 outputs at once. Of the bytes of eight inputs, byte 2·i is
// that of output i, and byte 2·i + 1 that of output 32 + i: so even bytes sum to outputs 0 to 31 in order, and odd ones to the
// others. A bit is 1 if the weight is above 0; those of inputs beyond the last are 0.
struct Sketch {
    uint8_t* bits;  // [V / 64, C / 8, 64]; null: the model has none
    float* scale;   // [V padded to 64] the mean size of an output's weights; 0: padding
    int blocks, eighths;  // blocks of 64 outputs, groups of eight inputs
};
constexpr int SKETCHED = 64;     // outputs of a block of a sketch
constexpr int LIKELY = 256;      // strips of a head with a sketch that are computed for a row, at least
constexpr int LIKELY_ROWS = 16;  // rows that are sketched at once

static inline int strips_of(const Sketch& sketch) { return padded(sketch.blocks * (SKETCHED / STRIP)); }  // with room for vectors

// Norms of a layer: before attention and feed-forward, after each (or null), of queries and of keys (or null). FEATURE
// is a draft head's norm of its feature, since its attention takes an embedding and a feature.
enum Norm { ATTENTION_IN, MLP_IN, ATTENTION_OUT, MLP_OUT, QUERY, KEY, FEATURE, NORMS };

struct Layer {
    float* norm[NORMS];            // [C padded], of queries and of keys [D padded]
    Matrix qkv, o, gate_up, down;  // the panels of gate_up hold 16 gates and their 16 ups
    int32_t window;                // how many tokens a token sees, counted back from itself; 0: all
    bool causal;                   // block drafters: a place of a block sees no place after it
    bool anchored;                 // block drafters: the window counts back from the anchor (fly/models/dflash.py)
    int32_t rope;                  // number of its rotary table
};

// The bytes of an array of these sizes, or -1 if a size is below 0 or the product reaches BEYOND.
template <class T, class... Sizes>
static ALWAYS_INLINE int64_t bytes_of(Sizes... sizes) {
    const int64_t all[] = {(int64_t)sizes..., sizeof(T)};
    int64_t bytes = 1;
    for (const int64_t size : all)
        if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) return -1;
    return bytes < BEYOND ? bytes : -1;
}

// Divides ``size`` bytes of memory into pieces, each at a multiple of 64. Without a ``base`` it only counts. A piece beyond the
// end is empty, and ``failed`` is set (library.h: lay_out).
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

// Buffers for one tile of tokens. Rows are padded to 32 values with zeros, which stay zeros.
struct Workspace {
    Block tile_memory;
    int tile;         // tokens they are for
    float* x;         // [T, C] the residual stream
    float* part;      // [T, C] what is added to x, if it is summed over processes or normalised first
    float* qkv;       // [T, (H + 2G)·D]
    void* normed;     // [T, C], in the type of activations; [T, 2C] of a head
    float* embedded;  // [T, C] of a head
    void* head_states;  // [T, F] of a head, in the type of activations
    void* attended;   // [T, H·D]
    void* gated;      // [T, intermediate]
    uint8_t* narrow;  // [T, the most inputs of a matrix, padded to 64] inputs of 8 bits; W8A8: plus 128
    float* steps;     // W8A8: [T] the value of a step; GROUPED: [T, ``steps_of``]
    Block last_memory;
    int last_rows;    // how many rows the following buffers have
    void* last;       // [rows, C] hidden states before the logits of a drafter's step
    float* logits;    // [rows, V]
    int spreads;      // how many distributions ``spread`` is for
    float* spread;    // [spreads, 2, V padded] for a row's distribution; block drafters have one for each thread
    uint8_t* tables;  // a head with a sketch: [LIKELY_ROWS, eighths, 2, 16] sums of four inputs, for each choice of signs
    float* peaks;     // [LIKELY_ROWS, strips] the largest sketched logit of each strip
    int32_t* likely;  // [LIKELY_ROWS, strips] the numbers of the strips whose logits are computed
    int32_t* likely_count;  // [LIKELY_ROWS]
    float* carried;   // [rows, C] draft heads: the features of a step's last tokens
    int longest;      // how many stored tokens of a row the scratch buffers are for
    Block scratch[MAX_THREADS];  // one for each thread
};

struct Variant;

struct Model {
    Shape shape;
    const Variant* variant;
    Layer* layers;
    float* norm;
    Matrix head;
    Sketch sketch;           // of the head
    Matrix fuse;             // draft heads: from hidden states of the target to a feature
    const int64_t* target;   // draft heads: the target's id of each output; memory of the owner
    Span<const char> masked;  // [F] what a parallel head takes for the hidden states before a mask token; memory of the owner
    // Block drafters with a Markov or a confidence head:
    Matrix joint;            // GATED: from hidden state and row to the gate; RECURRENT: from state, row and hidden state to
                             // the gate, the next state and the row
    Matrix correct;          // from a row to what is added to the logits
    Span<const char> before;  // [tokens, rank] the row of each token, in the type of hidden states; memory of the owner
    float* confidence;       // [shape.confidence + 1] weights, and the bias
    Span<const char> embedding;  // [V, C] memory of the owner; null: the embedding is tied to the head's panels
    int32_t embedding_kind;      // the kind of blocks of the embedding (interface.h: Stored); 0: plain numbers
    // If several processes share a model, each holds a part of every matrix. Of all ``tokens`` of the vocabulary it
    // holds ``shape.vocab``, from ``first_token`` on. ``sum`` adds ``count`` values over the processes, in place. Null:
    // one process.
    void (*sum)(float* values, int64_t count);
    int32_t tokens, first_token;
    float *cos, *sin;  // [ropes, positions, D/2]
    Workspace work;
    pthread_mutex_t lock;  // of the workspace
};

// One sequence of a call: ``count`` new tokens after ``start`` stored ones.
struct Row {
    const int32_t* table;  // its pages
    const uint8_t* mask;   // [count, start + count] which tokens each new one sees; null: causal
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

// From tokens to hidden states; from hidden states to logits; both; a drafter's loop; the embeddings of all tokens; the
// rows of the head; a block drafter's context alone; a block's hidden states and logits.
enum Job { FORWARD, LOGITS, SCORE, DRAFT, EMBED, ROWS, READ, PLACES };

// A call of a model, shared by its threads. A drafter's loop replaces the batch's rows and tokens in each step.
// ``threads`` is how many threads take part.
struct Call : Batch {
    Job job;
    Model* model;
    Row* row;             // [B]; in a drafter's loop the rows of the current step
    void* hidden;         // [T, C] in or out
    float* logits;        // [N, V] out
    const int32_t* kept;  // [N] the numbers of the tokens that logits follow; null: all
    int32_t kept_count;
    int32_t* choice;      // [N] out: the most likely token of each, NO_NUMBER where the logits are NaN; or null
    const int32_t* state;   // [states] numbers of layers after which the residual stream is wanted
    int32_t states;
    void* read;             // [T, states · C] out: the residual stream there
    float* features;        // [T, C] out: a draft head's features after all tokens; or null
    // [T, F] inputs of a draft head's first forward, in the type of hidden states; null: ``carried``
    const void* head_states;
    int32_t* head_state_at;  // [T] the number of each token's inputs among them, -1: ``masked``; null: in order
    // a drafter's loop
    int32_t most;           // columns of ``drafted``
    const int32_t* limit;   // [B] the most tokens to draft
    const Span<const int64_t>* stop;  // [B] token ids that end a row
    int64_t* drafted;       // [B, most] out
    int32_t* drafted_count; // [B] out
    float* reached;         // [B] the product of the largest probabilities so far
    const Sampling* sampling;  // [B]; null: every row takes the most likely token
    const float* uniform;      // [B, most] in [0, 1)
    float* distributions;      // [B, most, V] out: what each token was drawn from
    const Span<float>* raw;    // [B] [most, V] out: the logits at each token; null, or none for a row, if not needed
    Lookup* lookup;            // null: nothing is copied
    const Stops* stops;        // [B]
    // a block drafter
    bool in_blocks;          // the rows are blocks, which lie in one tile each
    int64_t* anchor;         // [B] the last token of each row's text
    float* chance;           // [B, most] the chance that each token is kept
    float *before, *memory;  // [B, rank padded] the Markov head's rows of the tokens before, and its states
    float* joined;           // [B, outputs of ``joint`` padded]
    void *joint_in, *correct_in;  // [B, inputs of ``joint`` and ``correct`` padded], in the type of activations
    // shared by the threads
    Piece* pieces;   // [B]
    int32_t piece_count, tile_tokens, tile_at;
    int32_t* live_row;   // [B] numbers of the rows of the current step
    int64_t *live_token, *live_position;  // [T]
    int32_t live_rows;
    int32_t** text;      // [B] each row's tokens, with room for the draft (without a lookup only the new ones are set)
    int32_t* matched;    // [B] live rows: how many tokens the lookup matched; copies of what followed are after the text
    int32_t* carried_at; // [B] live rows: their number in the forward before
    int32_t* kept_at;    // [B + 1] where each live row's logits begin: one after its last token, one after each copy
    alignas(64) int32_t taken;  // how many panels of the current product threads have taken
    alignas(64) int64_t stalled;  // nanoseconds of long waits at barriers
    Barrier barrier;
};

// The code for one kind of processor. The functions are described in decoder.h, sampling.h and lookup.h.
struct Variant {
    const char* name;
    bool tiles;  // products go by tiles where they can (products.h: by_tiles)
    int (*activation_bytes)(int weights);  // bytes of one input of a product
    void (*lay_scratch)(Dealer& from, const Shape*, int longest);  // takes a thread's own buffers
    void (*work)(Call*, int thread);  // does the call's job
    void (*top)(const float* logits, int vocab, int n, float* found);
    float (*entropy)(const float* logits, int vocab, float temperature, float peak, float least);
    void (*kept)(const float* logits, int rows, int each, int vocab, const Sampling* how, float* spread, float* peak,
                 float* least, float* total);
    int (*accepts)(const float* logits, int vocab, const Sampling* how, const int64_t* drafted, int count,
                   const float* distributions, const float* coins, bool all, float* spread, uint8_t* keeps);
    int64_t (*follow)(const float* logits, int vocab, const Sampling* how, int64_t rejected, const float* distribution,
                      float uniform, float* spread);
    int (*look_up)(const Lookup& lookup, int32_t* text, int length, int most);
};

extern const Variant amx, avx512bf16, avx512, avx2;

// Whether products take the loops for Intel's processors: 5 to 32 rows of W8A8 then lie side by side (beside.h). Set when the
// library is loaded, by the processor's maker; tests set it (library.cpp: fly_loops). No bit of a result depends on it.
extern bool intel;

constexpr const char* LACKS = "this processor lacks some of its instructions";

// Up to 32 rows of activations to be multiplied with one or two panels by tiles (amx.cpp), in the type W8A8 or BFLOAT16.
struct TileBlock {
    int type, panels;
    const char* rows;  // of the first tile
    long row_bytes;    // from one row to the next; a multiple of 64, as is what may be read of each
    long second;       // bytes from the first tile's rows to the second tile's; 0: there is one
    const char* weights;
    long panel;        // bytes of a panel
    // What is fetched meanwhile: ``fetched`` bytes for every 16 steps of each panel, first those ``ahead`` of its first
    // byte. ``then``: the bytes after the panel's last.
    long ahead;
    int fetched;
    bool close;        // into the first level of caches
    const char* then;
    long then_panel;
    void* sums;        // [rows, panels, 32] out
};

// A thread multiplies blocks between ``begin_tiles`` and ``end_tiles``. ``rows``: how many rows its tiles have in common.
void begin_tiles(int rows);
void multiply_tiles(const TileBlock& of);
void end_tiles();

// Why tiles are not to be used here; null: they are. Asks the system for them, and tries them.
const char* why_no_tiles();

// Reads a row of blocks of a known ``kind`` (blocks.cpp).
void read_row(int kind, const char* blocks, int width, float* to);

template <class T>
static ALWAYS_INLINE T min_of(T a, T b) { return a < b ? a : b; }
template <class T>
static ALWAYS_INLINE T max_of(T a, T b) { return a > b ? a : b; }

// Whether a model is a draft head whose first layer takes an embedding beside a feature (fly/models/eagle.py).
static inline bool combines(const Shape& shape) { return shape.features && !shape.block; }

// Whether a draft head computes all tokens of a draft in one forward.
static inline bool at_once(const Shape& shape) { return shape.block || shape.parallel; }

// The number of inputs of the widest matrix.
static inline int most_inputs(const Shape& shape) {
    const int of_layers = max_of(max_of(shape.width, shape.heads * shape.head_dim), shape.intermediate);
    const int of_head = max_of(shape.features, combines(shape) ? 2 * shape.width : 0);
    return max_of(of_layers, max_of(of_head, shape.rank ? 2 * shape.rank + shape.width : 0));
}

// Whether inputs of matrices are rounded to 8 bits, and how many floats each rounded row needs.
static inline bool narrows(const Shape& shape) { return shape.weights == W8A8 || shape.weights == GROUPED; }
static inline int steps_of(const Shape& shape) {
    return shape.weights == GROUPED ? 4 * (padded(most_inputs(shape), GROUP) / GROUP) : 1;  // groups.h: GroupedRow
}

static inline int bytes_of_type(int type) { return type == FLOAT32 ? 4 : type == BFLOAT16 ? 2 : 1; }

// Whether a layer's additions to the residual stream are stored apart first (Workspace: part).
static inline bool adds_apart(const Model* model) { return model->sum || model->layers[0].norm[ATTENTION_OUT]; }

static inline int64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static inline void pause() { __builtin_ia32_pause(); }

// Fetches a cache line into the second-level cache, or into the first. This is not the builtin, because GCC drops a
// function that only calls the builtin, as if it had no effect.
static inline void fetch(const void* at) { asm volatile("prefetcht1 (%0)" ::"r"(at)); }
static inline void fetch_close(const void* at) { asm volatile("prefetcht0 (%0)" ::"r"(at)); }

// Fills the next tile with as many new tokens as fit, from one row or several. If the call's fields are zero, this is the
// first tile.
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
        if (call->in_blocks && call->tile_tokens + call->row[row].count > MAX_TILE) break;
        const int count = min_of(call->row[row].count - from, MAX_TILE - call->tile_tokens);
        call->pieces[call->piece_count++] = {row, from, from + count, call->tile_tokens};
        call->tile_tokens += count;
    }
}

}  // namespace fly

// The worker threads that calls share, and how fast this machine reads memory with them. Knows nothing of what a call computes.
//
// ``run`` is called by every call of a model (calls.cpp: start). Workers look for work for a while after each call,
// then sleep. A call starts without workers that do not come in time because they sleep or have no processor. The
// result is the same with any number of threads. One call at a time has the workers; a second call runs on its caller's
// thread alone.
#include "library.h"

using namespace fly;

namespace {

struct Pool {
    pthread_mutex_t in_use, lock;
    pthread_cond_t wake;
    int32_t workers;
    int32_t alone, patience;     // calls that still run without workers; such calls after the next stall
    alignas(64) int32_t gate;    // workers that joined the next call; -1 is closed
    int32_t places;              // how many workers that call takes
    alignas(64) int32_t started;
    alignas(64) int32_t busy;    // joined workers that have not finished
    alignas(64) int32_t sleeping;
    Call* call;
    void (*work)(Call*, int);
};

Pool pool;

constexpr int64_t LOOK_OUT = 2000000, SPIN = 20000;  // nanoseconds that a worker waits, and at first spins, for a call
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

// Joins the next call. Returns the number of this thread in it, or 0 if other workers were faster.
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

// Starts threads up to the wanted number, or as many as the system allows.
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

}  // namespace

void fly::run(Call* call, void (*work)(Call*, int), int threads, int64_t patience) {
    threads = threads_for(threads);
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
    // If the threads stalled so long that one alone would have been faster, the next calls run alone.
    if (call->stalled * (joined + 1) > (nanoseconds() - begun) * joined * joined) {
        pool.alone = pool.patience;
        pool.patience = pool.patience * 2 < LONGEST ? pool.patience * 2 : LONGEST;
    } else if (joined) {
        pool.patience = SHORTEST;
    }
    pthread_mutex_unlock(&pool.in_use);
}

namespace {

struct Reading : Call {
    const uint64_t* from;
    int64_t lines;
    uint64_t sum;
};

void read_part(Call* call, int thread) {
    constexpr int STREAMS = 4, SOON = 32;  // panels that a product reads at once; lines fetched ahead in each
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

}  // namespace

// The sum of numbers, 8 a cache line: shows how fast they can be read.
EXPORT uint64_t fly_sum(Span<const uint64_t> numbers, int threads) {
    Reading reading = {};
    reading.from = numbers, reading.lines = numbers.count() / 8;
    run(&reading, read_part, threads, 1000000);
    return reading.sum;
}


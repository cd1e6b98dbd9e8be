// A team of threads from the OpenMP runtime that torch has loaded. It is called through libgomp's
// functions, which the runtimes of LLVM and Intel offer as well, so that any compiler will do.
#pragma once

#include <algorithm>
#include <cstdint>

extern "C" {
void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags);
void GOMP_barrier();
int omp_get_thread_num();
int omp_get_num_threads();
}

// One thread of a team, and how many they are.
struct Team {
    int64_t thread, threads;

    // This thread's share of 0 ... n - 1 is one run of neighbors, from begin(n) to end(n) - 1.
    int64_t begin(int64_t n) const { return thread * (n / threads) + std::min(thread, n % threads); }

    int64_t end(int64_t n) const { return Team{thread + 1, threads}.begin(n); }

    // Call f(i) for this thread's share of i = 0 ... n - 1.
    template <class F>
    void share(int64_t n, F f) const {
        const int64_t last = end(n);
        for (int64_t i = begin(n); i < last; ++i) f(i);
    }

    // Call f() in one thread after the other.
    template <class F>
    void in_turn(F f) const {
        for (int64_t turn = 0; turn < threads; ++turn) {
            if (turn == thread) f();
            GOMP_barrier();
        }
    }
};

// Call body(team) in every thread of a team. Each thread has its own copy of the body, so that what
// it captures by value stays in registers: stores to a map might change what lies in memory.
template <class F>
void parallel(int64_t threads, F body) {
    const auto call = [](void *data) {
        const F copy = *static_cast<F *>(data);
        copy(Team{omp_get_thread_num(), omp_get_num_threads()});
    };
    GOMP_parallel(call, &body, threads, 0);
}

// Call f(i) for i = 0 ... n - 1, shared among the threads of a team.
template <class F>
void parallel_for(int64_t threads, int64_t n, F f) {
    parallel(threads, [=](const Team &team) { team.share(n, f); });
}

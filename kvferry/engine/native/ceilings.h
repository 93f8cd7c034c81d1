// What this machine can do at most: the multiply-adds of a projection's inner loop from registers alone, and reading memory in long runs.

#define CHAINS 12  // sums that do not wait for each other: an addition's latency times the units that add, and more
#define RUNS 4     // of memory, read at a time

INLINE vec multiply_once(vec sums, vec value, vec weights, const int kind) {
    if (kind == KIND_INT8) return (vec)multiply_add((Sums)sums, (const uint8_t *)&weights, ((ivec)value)[0]);
    if (kind == KIND_BFLOAT16) return add_pair(sums, weights, ((ivec)value)[0]);
    return sums + value * weights;
}

static __attribute__((noinline)) vec multiply_chains(vec value, vec weights, long rounds, const int kind) {
    vec sums[CHAINS];
#pragma GCC unroll 12
    for (int c = 0; c < CHAINS; c++) sums[c] = value;
    for (long k = 0; k < rounds; k++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) {
            sums[c] = multiply_once(sums[c], value, weights, kind);
            __asm__("" : "+v"(sums[c]), "+v"(weights));  // so that nothing can be done beforehand
        }
    }
#pragma GCC unroll 12
    for (int c = 1; c < CHAINS; c++) sums[0] += sums[c];
    return sums[0];
}

// Returns the operations that it did, a multiplication and an addition being two.
double multiply_much(int32_t kind, int64_t rounds, int32_t threads) {
    int products = kind == KIND_INT8 ? 4 : kind == KIND_BFLOAT16 ? 2 : 1;
    double operations = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(+ : operations)
    {
        vec value = splat(1.0f), weights = splat(0.5f), sums;
        switch (kind) {
            case KIND_INT8: sums = multiply_chains(value, weights, rounds, KIND_INT8); break;
            case KIND_BFLOAT16: sums = multiply_chains(value, weights, rounds, KIND_BFLOAT16); break;
            default: sums = multiply_chains(value, weights, rounds, KIND_FLOAT32);
        }
        __asm__ volatile("" : : "v"(sums));  // or the compiler leaves the work out
        operations += 2.0 * products * LANES * CHAINS * rounds;
    }
    return operations;
}

// The sum of `count` numbers: a multiple of LANES * RUNS * threads.
float read_much(const float *from, int64_t count, int32_t threads) {
    float total = 0;
    long each = count / threads, run = each / RUNS;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(+ : total)
    for (int t = 0; t < threads; t++) {
        const float *begin = from + t * each;
        vec sums[RUNS] = {};
        for (long k = 0; k < run; k += LANES)
            for (int r = 0; r < RUNS; r++) sums[r] += load(begin + r * run + k);
        for (int r = 0; r < RUNS; r++) total += sum(sums[r]);
    }
    return total;
}

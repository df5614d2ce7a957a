// The few lines of a test framework that these tests need: CHECK stops with place and text, TEST registers a function.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#define CHECK(condition)                                                               \
    do {                                                                               \
        if (!(condition)) {                                                            \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);       \
            std::abort();                                                              \
        }                                                                              \
    } while (0)

// For the `fault()` of a structure: says which invariant is broken.
#define CHECK_SOUND(structure)                                                         \
    do {                                                                               \
        if (const char* wrong = (structure).fault()) {                                 \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, wrong);            \
            std::abort();                                                              \
        }                                                                              \
    } while (0)

struct Test {
    const char* name;
    void (*run)();
};

inline std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

#define TEST(name)                                                                     \
    static void name();                                                                \
    static const bool name##_added = (tests().push_back({#name, name}), true);         \
    static void name()

inline std::mt19937_64& random_bits() {
    static std::mt19937_64 generator(20240607);
    return generator;
}

inline unsigned long long below(unsigned long long limit) { return random_bits()() % limit; }

int main() {
    for (const Test& test : tests()) {
        std::printf("  %s\n", test.name);
        std::fflush(stdout);
        test.run();
    }
}

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "chain.hpp"
#include "check.hpp"
#include "sha256.hpp"

using namespace kvdir::hashing;

namespace {

std::string hex(const u8* data, u64 bytes) {
    std::string out;
    char two[3];
    for (u64 i = 0; i < bytes; ++i) out += (std::snprintf(two, sizeof two, "%02x", data[i]), two);
    return out;
}

// On the heap and no byte longer, so that the sanitizer sees every step outside.
std::vector<u8> hashed(Chain chain, const std::vector<u32>& tokens, u64 block_tokens, const std::vector<u8>& root,
                       const std::vector<u8>* extras = nullptr, const std::vector<u64>* ends = nullptr) {
    const u64 count = tokens.size() / block_tokens;
    std::vector<u8> out(count * width_of(chain));
    const Blocks blocks{tokens.data(), count, block_tokens, root.empty() ? nullptr : root.data(), extras ? extras->data() : nullptr,
                        ends ? ends->data() : nullptr, 1337};
    CHECK(hash_blocks(chain, blocks, out.data()) == Outcome::done);
    return out;
}

const std::vector<u32> kEdges{0, 23, 24, 255, 256, 65535, 65536, 0x7fffffff, 0x80000000, 0xffffffff, 1, 2};

}  // namespace

TEST(sha256_equals_the_vectors_of_fips_180) {
    struct {
        std::string message;
        const char* digest;
    } const vectors[] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
        {std::string(1000000, 'a'), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
    };
    for (const auto& vector : vectors) {
        u8 out[32];
        const u8* message = reinterpret_cast<const u8*>(vector.message.data());
        sha256(message, vector.message.size(), out);
        CHECK(hex(out, 32) == vector.digest);
        sha256_portable(message, vector.message.size(), out);
        CHECK(hex(out, 32) == vector.digest);
    }
}

TEST(sha256_is_the_same_by_instructions_and_by_portable_code) {
    if (!sha256_is_accelerated()) std::puts("no SHA instructions here: only portable code is tested");
    std::mt19937 random(1);
    for (u64 bytes = 0; bytes < 400; ++bytes) {
        std::vector<u8> message(bytes);
        for (u8& byte : message) byte = static_cast<u8>(random());
        u8 one[32], other[32];
        sha256(message.data(), bytes, one);
        sha256_portable(message.data(), bytes, other);
        CHECK(std::memcmp(one, other, 32) == 0);
    }
}

TEST(chains_stay_inside_their_buffers_for_tokens_of_every_length) {
    for (u32 number = 0; number < kChains; ++number) {
        const Chain chain = static_cast<Chain>(number);
        const std::vector<u8> root(width_of(chain), 7);
        for (u64 block_tokens = 1; block_tokens <= kEdges.size(); ++block_tokens) {
            const std::vector<u8> out = hashed(chain, kEdges, block_tokens, root);
            const std::vector<u8> again = hashed(chain, kEdges, block_tokens, root);
            CHECK(out == again);
        }
        for (u32 token : kEdges) hashed(chain, std::vector<u32>(4096, token), 1024, root);
    }
}

TEST(chain_continued_from_a_block_is_the_same_chain) {
    for (u32 number = 0; number < kChains; ++number) {
        const Chain chain = static_cast<Chain>(number);
        const u32 width = width_of(chain);
        const std::vector<u8> whole = hashed(chain, kEdges, 3, std::vector<u8>(width, 1));
        const std::vector<u32> rest(kEdges.begin() + 6, kEdges.end());
        const std::vector<u8> tail = hashed(chain, rest, 3, std::vector<u8>(whole.begin() + width, whole.begin() + 2 * width));
        CHECK(std::equal(tail.begin(), tail.end(), whole.begin() + 2 * width));
    }
}

TEST(chains_without_a_root_begin_as_their_projects_do) {
    const std::vector<u8> dynamo = hashed(Chain::xxh3_seeded, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, 4, {});
    CHECK(hex(dynamo.data(), 24) == "cb38e4d7fb2dca5c44a2b2379d6d3c3daea1e67a6c80cf84");
    const std::vector<u8> sglang = hashed(Chain::sha256_raw, {1, 2, 3, 4, 5, 6, 7, 8}, 4, {});
    CHECK(hex(sglang.data(), 8) == "cf97adeedb59e05b");
    CHECK(hex(sglang.data() + 32, 8) == "4ebfa8a1f3c34151");
}

TEST(extra_keys_are_read_only_where_they_are) {
    const std::vector<u8> extras{0xf6, 0x81, 0x01};
    const std::vector<u64> ends{1, 3, 3};
    const std::vector<u8> root(32, 1);
    const std::vector<u8> out = hashed(Chain::sha256_cbor, kEdges, 4, root, &extras, &ends);
    const std::vector<u8> plain = hashed(Chain::sha256_cbor, kEdges, 4, root);
    CHECK(std::equal(out.begin(), out.begin() + 32, plain.begin()));  // 0xf6 says "nothing"
    CHECK(!std::equal(out.begin() + 32, out.begin() + 64, plain.begin() + 32));
}

TEST(message_of_more_than_a_pickle_frame_is_refused) {
    const std::vector<u8> root(32, 1);
    std::vector<u8> out(32);
    for (u64 count : {u64{21000}, u64{22000}}) {  // three bytes a token
        const std::vector<u32> tokens(count, 300);
        const Blocks blocks{tokens.data(), 1, count, root.data(), nullptr, nullptr, 0};
        CHECK((hash_blocks(Chain::sha256_pickle, blocks, out.data()) == Outcome::done) == (count == 21000));
        CHECK(hash_blocks(Chain::sha256_cbor, blocks, out.data()) == Outcome::done);
    }
}

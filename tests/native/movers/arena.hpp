// An arena on the heap, exactly as large as it says, so that AddressSanitizer sees a byte beyond it.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "check.hpp"
#include "copy.hpp"
#include "slot.hpp"
#include "wire.hpp"

// A capability as an owner would make it; the tag is as good as any.
inline kvdir::wire::Capability capability_for(uint64_t lock, uint64_t epoch, uint64_t expires_ns = UINT64_MAX) {
    kvdir::wire::Capability made{kvdir::wire::kCapabilityVersion, {}, lock, epoch, expires_ns, {}};
    for (size_t i = 0; i < sizeof made.tag; ++i) made.tag[i] = static_cast<uint8_t>(lock * 31 + i * 7 + 1);
    return made;
}

struct Arena {
    static constexpr uint32_t kWidth = 16;

    uint64_t block_bytes, slots, stride;
    size_t bytes;
    std::unique_ptr<uint8_t, void (*)(void*)> memory{nullptr, std::free};
    kvdir::Region region;
    std::vector<uint64_t> offsets;

    Arena(uint64_t block_bytes_, uint64_t slots_) : block_bytes(block_bytes_), slots(slots_) {
        stride = (kvdir::kHeaderBytes + block_bytes + kvdir::kAlignBytes - 1) / kvdir::kAlignBytes * kvdir::kAlignBytes;
        bytes = kvdir::kSuperblockBytes + slots * stride;
        memory.reset(static_cast<uint8_t*>(std::aligned_alloc(kvdir::kAlignBytes, bytes)));
        std::memset(memory.get(), 0, bytes);
        kvdir::Superblock block{};
        block.magic = kvdir::kArenaMagic;
        block.version = kvdir::kLayoutVersion;
        block.header_bytes = kvdir::kHeaderBytes;
        block.arena_bytes = bytes;
        block.classes = 1;
        block.size_class[0] = {{}, block_bytes, stride, kvdir::kSuperblockBytes, slots};
        std::memcpy(memory.get(), &block, sizeof block);
        region = kvdir::Region(memory.get(), bytes);
        for (uint64_t i = 0; i < slots; ++i) offsets.push_back(kvdir::kSuperblockBytes + i * stride);
    }

    // Commits pseudo-random payloads into every slot.
    struct Content {
        std::vector<uint8_t> digest, fingerprints;
        std::vector<kvdir::Record> records;
        kvdir::Blocks blocks() const { return {records.size(), digest.data(), fingerprints.data(), kWidth}; }
    };
    Content fill() {
        Content content{std::vector<uint8_t>(kvdir::kDigestBytes, 7), std::vector<uint8_t>(slots * kWidth), {}};
        for (uint8_t& byte : content.fingerprints) byte = static_cast<uint8_t>(random_bits()());
        reserve();
        for (const uint64_t offset : offsets)
            for (uint64_t i = 0; i < block_bytes; ++i) region.payload(offset)[i] = static_cast<uint8_t>(random_bits()());
        content.records.resize(slots);
        kvdir::commit(region, offsets.data(), {slots, content.digest.data(), content.fingerprints.data(), kWidth},
                      static_cast<uint32_t>(block_bytes), nullptr, content.records.data());
        return content;
    }
    void reserve() {
        std::vector<uint64_t> generations(slots);
        kvdir::begin_write(region, offsets.data(), slots, generations.data());
    }
    std::vector<uint8_t*> destinations(const std::vector<kvdir::Record>& records) {
        return kvdir::destinations_in(region, offsets.data(), records.data(), records.size());
    }
    bool same_payload(uint64_t slot, const Arena& other) const {
        return std::memcmp(region.payload(offsets[slot]), other.region.payload(other.offsets[slot]), block_bytes) == 0;
    }
};

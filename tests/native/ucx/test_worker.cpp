// The UCX worker's promises, with a libucp that does what the test says (fake_ucp.hpp).
#include "worker.hpp"

#include <cstring>
#include <numeric>
#include <stdexcept>

#include "fake_ucp.hpp"

using namespace kvdir::ucx;

namespace {

constexpr uint64_t kSlice = 1000000;
const Incarnation kOwner{1}, kReader{2};

struct Pair {
    Api api = Fake::api();
    std::vector<uint8_t> memory = std::vector<uint8_t>(4096), into = std::vector<uint8_t>(4096);
    Worker owner{api, {}, kOwner}, reader{api, {{"TLS", "rc"}}, kReader};
    std::string key, address;
    std::vector<Event> seen;

    Pair() {
        Fake::rules = {};
        Fake::posts = 0;
        std::iota(memory.begin(), memory.end(), 0);
        key = owner.map(memory.data(), memory.size(), true);
        CHECK(reader.map(into.data(), into.size(), false).empty());
        address = owner.address();
    }
    ~Pair() { CHECK(Fake::requests == 0); }

    void settle() {
        for (int i = 0; i < 10; ++i) {
            reader.progress(kSlice);
            owner.progress(kSlice);
            for (const Event& event : reader.take_events()) seen.push_back(event);
        }
    }
    WorkerHandle at(const std::string& bytes) {
        WorkerHandle worker = nullptr;
        std::memcpy(&worker, bytes.data(), sizeof worker);
        return worker;
    }
    Endpoint endpoint() { return at(reader.address())->endpoints.front(); }

    uint64_t connect(const Incarnation& who = kOwner) {
        const uint64_t link = reader.connect(address, key, who, 1);
        settle();
        return link;
    }
    std::vector<Get> gets(size_t count, size_t bytes = 64) {
        std::vector<Get> made;
        for (size_t i = 0; i < count; ++i) made.push_back({reinterpret_cast<uint64_t>(into.data()) + i * bytes, i * bytes, bytes});
        return made;
    }
    // The one status that this ticket ended with.
    int64_t status_of(uint64_t ticket) {
        CHECK(times(ticket) == 1);
        for (const Event& event : seen)
            if (event.ticket == ticket) return event.status;
        return 0;
    }
    size_t times(uint64_t ticket) {
        return static_cast<size_t>(std::count_if(seen.begin(), seen.end(), [&](const Event& event) { return event.ticket == ticket; }));
    }
};

}  // namespace

TEST(bytes_arrive_and_a_batch_is_reported_once_after_the_last) {
    Pair pair;
    const uint64_t link = pair.connect();
    CHECK(pair.status_of(1) == 0);
    pair.reader.get(link, pair.gets(20), 2);
    pair.settle();
    CHECK(pair.times(2) == 0);
    Fake::answer(pair.endpoint());
    pair.settle();
    CHECK(pair.status_of(2) == 0);
    CHECK(std::memcmp(pair.into.data(), pair.memory.data(), 20 * 64) == 0);
}

TEST(a_batch_that_finishes_while_it_is_posted_is_reported_once) {
    Pair pair;
    const uint64_t link = pair.connect();
    Fake::rules.finish_at_once = 1;
    pair.reader.get(link, pair.gets(5), 2);
    pair.settle();
    CHECK(pair.status_of(2) == 0);
    pair.reader.get(link, {}, 3);
    pair.settle();
    CHECK(pair.status_of(3) == 0);
}

TEST(a_batch_whose_posting_fails_half_way_waits_for_what_was_posted) {
    Pair pair;
    const uint64_t link = pair.connect();
    Fake::rules.fail_after = 3;
    pair.reader.get(link, pair.gets(10), 2);
    pair.settle();
    CHECK(pair.times(2) == 0);
    CHECK(Fake::posts == 4);
    Fake::answer(pair.endpoint());
    pair.settle();
    CHECK(pair.status_of(2) == -3);
}

TEST(gets_under_way_are_reported_before_their_link_when_it_is_closed) {
    Pair pair;
    const uint64_t link = pair.connect();
    pair.reader.get(link, pair.gets(10), 2);
    pair.reader.get(link, pair.gets(1), 3);
    pair.reader.close(link, 4);
    CHECK(pair.reader.failed(link));
    pair.reader.get(link, pair.gets(1), 5);
    pair.settle();
    CHECK(pair.status_of(2) == kCanceled);
    CHECK(pair.status_of(3) == kCanceled);
    CHECK(pair.status_of(5) == kNotConnected);
    CHECK(pair.status_of(4) == 0);
    CHECK(pair.seen.back().ticket == 4);
    CHECK(Fake::keys == 0);
    pair.reader.close(link, 6);
    pair.settle();
    CHECK(pair.status_of(6) == 0);
}

TEST(nothing_is_posted_on_a_link_that_has_failed) {
    Pair pair;
    const uint64_t link = pair.connect();
    pair.reader.get(link, pair.gets(2), 2);
    Fake::lose(pair.endpoint());
    pair.settle();
    CHECK(pair.status_of(2) == -25);
    CHECK(pair.reader.failed(link));
    const size_t posts = Fake::posts;
    pair.reader.get(link, pair.gets(2), 3);
    pair.settle();
    CHECK(pair.status_of(3) == -25);
    CHECK(Fake::posts == posts);
    pair.reader.close(link, 4);
    pair.settle();
    CHECK(pair.status_of(4) == 0);
}

TEST(nothing_is_posted_before_the_peer_has_welcomed_us) {
    Pair pair;
    pair.at(pair.address)->deaf = true;
    const uint64_t link = pair.connect();
    CHECK(pair.times(1) == 0);
    pair.reader.get(link, pair.gets(1), 2);
    pair.reader.close(link, 3);
    pair.settle();
    CHECK(pair.status_of(2) == kNotConnected);
    CHECK(pair.status_of(1) == kCanceled);
    CHECK(pair.status_of(3) == 0);
    CHECK(Fake::posts == 0);
}

TEST(another_incarnation_is_refused) {
    Pair pair;
    const uint64_t link = pair.connect(Incarnation{9});
    CHECK(pair.status_of(1) == kNotConnected);
    pair.reader.get(link, pair.gets(1), 2);
    pair.settle();
    CHECK(pair.status_of(2) == kNotConnected);
    CHECK(Fake::posts == 0);
}

TEST(links_have_numbers_that_other_peers_cannot_guess) {
    Pair pair;
    const uint64_t first = pair.connect(), second = pair.connect();
    CHECK(first + 1 != second);
    CHECK(first > 1000 && second > 1000);
}

TEST(gets_beyond_the_peers_memory_or_outside_ours_are_never_posted) {
    Pair pair;
    const uint64_t link = pair.connect(), here = reinterpret_cast<uint64_t>(pair.into.data());
    const auto refused = [&](const Get& get) {
        try {
            pair.reader.get(link, {{here, 0, 1}, get}, 99);
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    CHECK(refused({here, 4096, 1}));
    CHECK(refused({here, 4000, 97}));
    CHECK(refused({here, ~uint64_t{0}, 2}));
    CHECK(refused({here, 0, ~uint64_t{0}}));
    CHECK(refused({here + 4090, 0, 7}));
    CHECK(refused({here - 1, 0, 1}));
    CHECK(refused({reinterpret_cast<uint64_t>(pair.memory.data()), 0, 1}));
    CHECK(Fake::posts == 0);
    pair.settle();
    CHECK(pair.times(99) == 0);
}

TEST(garbage_and_unreachable_peers_leave_nothing_behind) {
    Pair pair;
    bool refused = false;
    try {
        pair.reader.connect(pair.address, "x", kOwner, 1);
    } catch (const std::invalid_argument&) {
        refused = true;
    }
    CHECK(refused);
    Fake::rules.connect = -6;
    try {
        pair.reader.connect(pair.address, pair.key, kOwner, 2);
        CHECK(false);
    } catch (const std::runtime_error&) {
    }
    pair.settle();
    CHECK(pair.times(2) == 0);
    CHECK(Fake::keys == 0);
}

TEST(messages_that_are_none_change_nothing) {
    Pair pair;
    const uint64_t link = pair.connect();
    for (WorkerHandle worker : {pair.at(pair.address), pair.at(pair.reader.address())})
        for (unsigned id : {1U, 2U})
            for (size_t bytes : {0, 1, 31, 32, 33, 200}) {
                const std::string noise(bytes, '\x5a');
                const MessageParams params{0, nullptr};
                worker->handlers[id].callback(worker->handlers[id].arg, noise.data(), noise.size(), nullptr, 0, &params);
            }
    CHECK(!pair.reader.failed(link));
    CHECK(pair.reader.lanes(link).front().transport == "rc_mlx5");
    CHECK(pair.reader.lanes(link + 1).empty());
}

TEST(settings_that_ucx_does_not_know_are_refused) {
    const Api api = Fake::api();
    try {
        const Worker worker(api, {{"NONSENSE", "1"}}, kOwner);
        CHECK(false);
    } catch (const std::runtime_error& error) {
        CHECK(std::string(error.what()).find("UCX_NONSENSE=1") != std::string::npos);
    }
}

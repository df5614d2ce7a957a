#include "tcp_client.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "clock.hpp"
#include "tcp_reading.hpp"

namespace kvdir {

TcpClient::TcpClient(const std::string& host, uint16_t port, MakeStream make)
    : where_(endpoint(host, port)), make_(std::move(make)), socket_(begin_connect(host, port)), fd_(socket_.get()) {}

TcpClient::TcpClient(const std::string& host, uint16_t port, uint64_t deadline_ns, MakeStream make)
    : TcpClient(host, port, std::move(make)) {
    for (Need need = Need::WRITE; need != Need::NOTHING; need = greet())
        if (!wait_for(fd_, need, deadline_ns)) throw std::runtime_error(late_reason());
}

Need TcpClient::greet() {
    if (stage_ == Stage::CONNECT) {
        const int error = connect_error(fd_);
        if (error != 0) throw std::runtime_error("cannot connect to " + where_ + ": " + error_text(error));
        stream_ = make_(std::move(socket_));
        computes_ = stream_->computes();
        stage_ = Stage::HANDSHAKE;
    }
    if (stage_ == Stage::HANDSHAKE) {
        const Io io = stream_->handshake();
        if (io == Io::CLOSED) throw std::runtime_error("no connection to " + where_ + ": " + stream_->reason());
        if (io != Io::MOVED) return need_of(io);
        say_hello();
        stage_ = Stage::HELLO;
    }
    return stage_ == Stage::HELLO ? hear_hello() : Need::NOTHING;
}

void TcpClient::say_hello() {
    ours_.magic = wire::kHelloMagic;
    ours_.version = wire::kVersion;
    outgoing_.add(&ours_, sizeof ours_);
}

Need TcpClient::hear_hello() {
    const Io sent = write_list(*stream_, outgoing_);
    while (hello_bytes_ < sizeof hello_) {
        const iovec part{reinterpret_cast<uint8_t*>(&hello_) + hello_bytes_, sizeof hello_ - hello_bytes_};
        const Moved got = stream_->readv(&part, 1);
        if (got.io == Io::CLOSED && hello_bytes_ >= 2 && wire::looks_like_tls(reinterpret_cast<const uint8_t*>(&hello_)))
            throw std::runtime_error(where_ + " speaks TLS and we do not: set data_tls_cert, data_tls_key and data_tls_ca here, too");
        if (got.io == Io::CLOSED)
            throw std::runtime_error(where_ + " ended the connection without a hello (" + stream_->reason() +
                                     "): too many connections there, or no kvdir tcp data plane");
        if (got.io != Io::MOVED) return sent == Io::WANT_WRITE ? Need::READ_OR_WRITE : need_of(got.io);
        hello_bytes_ += got.bytes;
    }
    take_hello();
    return Need::NOTHING;
}

void TcpClient::take_hello() {
    if (hello_.magic != wire::kHelloMagic) throw std::runtime_error("the peer is not a kvdir tcp data plane (wrong magic)");
    if (hello_.version != wire::kVersion)
        throw std::runtime_error("the peer speaks version " + std::to_string(hello_.version) +
                                 " of the tcp data plane, we speak " + std::to_string(wire::kVersion) + "; upgrade the older agent");
    epoch_ = hello_.epoch;
    stage_ = Stage::READY;
}

std::string TcpClient::late_reason() const {
    switch (stage_) {
        case Stage::CONNECT: return "no answer in time from " + where_;
        case Stage::HANDSHAKE: return where_ + " took the connection but did not finish the handshake in time";
        default: return where_ + " took the connection but said no hello in time";
    }
}

void TcpClient::close() {
    const std::lock_guard<std::mutex> guard(mutex_);
    broken_.store(true, std::memory_order_release);
    if (stream_) ::shutdown(stream_->fd(), SHUT_RDWR);  // ends a read in progress, which then closes it
    if (!busy_) stream_.reset();
}

void TcpClient::give_up() {
    const std::lock_guard<std::mutex> guard(mutex_);
    broken_.store(true, std::memory_order_release);
    stream_.reset();
}

void TcpClient::end_turn() {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (broken()) stream_.reset();
    busy_ = false;
    turn_.notify_one();
}

std::unique_ptr<TcpReading> TcpClient::try_read(const ReadJob& job, uint8_t* statuses) {
    std::unique_lock<std::mutex> guard(mutex_);
    if (busy_) return nullptr;
    busy_ = true;
    guard.unlock();
    return std::make_unique<TcpReading>(*this, job, statuses);
}

void TcpClient::read(const ReadJob& job, uint8_t* statuses) {
    const std::chrono::steady_clock::time_point until{std::chrono::nanoseconds(job.deadline_ns)};  // CLOCK_MONOTONIC
    std::unique_lock<std::mutex> guard(mutex_);
    if (!turn_.wait_until(guard, until, [this] { return !busy_; })) {
        std::fill_n(statuses, job.blocks.count, static_cast<uint8_t>(LATE));
        return;
    }
    busy_ = true;
    guard.unlock();
    TcpReading reading(*this, job, statuses);
    for (Need need = reading.begin(); need != Need::NOTHING; need = reading.advance())
        if (!wait_for(fd_, need, job.deadline_ns)) return reading.end(LATE);
}

}  // namespace kvdir

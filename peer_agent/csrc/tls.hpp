// TLS 1.3 for the tcp plane: both sides show a certificate that the configured CA signed. OpenSSL does it (openssl.hpp).
//
//   Credentials   the three files; hands out the newest Context that works
//     Context     one reading of them, immutable, shared by the streams that began with it
//       Stream    one connection (stream.hpp)
//
//   writev: parts -> records -> outgoing -> socket        readv: socket -> OpenSSL's buffer -> parts
//           gathered  encrypted   one send for kChunkBytes         one recv for kChunkBytes   decrypted
//
// Rules
// - Only TLS 1.3; no session tickets, no resumption, no early data. Names in certificates are not looked at.
// - A server's handshake is done when it has verified the client. A client's is done before it hears what the server thinks of
//   its certificate: a refusal is the reason of its first read.
// - A write counts bytes only when their ciphertext has left for the kernel. OpenSSL copied the plaintext when it encrypted
//   it, earlier. So "after the last payload byte was counted" is, as on a plain socket, after every byte of it was copied:
//   the torn check of wire.hpp builds on that. After a write that could not go on, the next begins with the same bytes.
// - The sending key is changed every kRekeyRecords: AES-GCM may not encrypt more than 2^24.5 records under one key (RFC 8446,
//   5.5), which a fast connection reaches within minutes, and OpenSSL does not count for us.
// - Who sends more than kIdleBytes of ciphertext beyond twice the data in it (key updates, tickets, records of a byte) is closed:
//   OpenSSL reads such records on and on in one call, and no deadline would end it.
// - Memory of a stream: at most 2 * kChunkBytes of ciphertext each way. SIGPIPE is never raised.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "openssl.hpp"
#include "stream.hpp"

namespace kvdir::tls {

constexpr size_t kRecordBytes = 16384;  // RFC 8446, 5.1
constexpr size_t kChunkBytes = 64 << 10;
constexpr uint64_t kRekeyRecords = 1 << 23;
constexpr size_t kIdleBytes = 128 << 10;

// PEM files. certificate: ours first, then intermediate ones. key: unencrypted. ca: who may sign certificates of peers.
struct Files {
    std::string certificate, key, ca;
};

class Context {
  public:
    // Throws std::runtime_error naming the file and what to do: unreadable, not PEM, key of another certificate, encrypted
    // key, expired, not signed by `ca`, not allowed to be client and server.
    explicit Context(const Files& files);

    openssl::SslContext* get() const { return context_.get(); }
    int64_t expires_unix_s() const { return expires_unix_s_; }

  private:
    struct Free {
        void operator()(openssl::SslContext* context) const { openssl::library().SSL_CTX_free(context); }
    };

    void configure();
    void load(const Files& files);
    void verify_own(const Files& files);

    const openssl::Library& lib_;
    const std::unique_ptr<openssl::SslContext, Free> context_;
    int64_t expires_unix_s_ = 0;
};

struct CredentialStats {
    uint64_t reloads, failed_reloads;
    int64_t expires_unix_s;  // of our certificate
    std::string failure;     // of the last reload, empty after one that worked
};

// From any thread.
class Credentials {
  public:
    // Throws what Context throws. Looks at the files at most every `look_ns`.
    explicit Credentials(Files files, uint64_t look_ns = 1000000000ULL);

    // Changed files that do not work (yet) leave the Context as it is.
    std::shared_ptr<const Context> current();
    CredentialStats stats();

  private:
    std::string fingerprint_of_files() const;

    const Files files_;
    const uint64_t look_ns_;
    std::mutex mutex_;
    std::string seen_;  // what the files looked like when context_ was read
    std::shared_ptr<const Context> context_;
    uint64_t looked_ns_;
    uint64_t reloads_ = 0, failed_reloads_ = 0;
    std::string failure_;
};

// How handshakes ended, since the start.
struct Counts {
    std::atomic<uint64_t> done{0};
    std::atomic<uint64_t> not_tls{0};         // what came is no TLS, or an older version
    std::atomic<uint64_t> no_certificate{0};  // the peer showed none
    std::atomic<uint64_t> untrusted{0};       // the peer's certificate has expired, is of another CA, or not meant for this
    std::atomic<uint64_t> refused_us{0};      // the peer says so; it comes after `done` where we are the client
    std::atomic<uint64_t> broken{0};          // anything else against the protocol, also later
    std::atomic<uint64_t> unfinished{0};      // the peer left, or somebody here lost patience
};

enum class Side : uint8_t { CLIENT, SERVER };

// rekey_records: other values are for tests. `counts` may be null.
std::unique_ptr<Stream> tls_stream(Fd fd, Side side, std::shared_ptr<const Context> context, std::shared_ptr<Counts> counts = nullptr,
                                   uint64_t rekey_records = kRekeyRecords);

// Streams that begin with what `credentials` have then.
MakeStream make_tls(Side side, std::shared_ptr<Credentials> credentials, std::shared_ptr<Counts> counts);

}  // namespace kvdir::tls

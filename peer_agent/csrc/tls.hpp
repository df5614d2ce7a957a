// TLS 1.3 for the tcp plane: both sides show a certificate that the configured CA signed. OpenSSL does it (openssl.hpp).
//
//   Credentials   the three files; hands out the newest Context that works
//     Context     one reading of them, immutable, shared by the sessions that began with it
//       Session   one connection: handshake, then reads and writes, none of which ever waits
//
//   write: parts -> records -> outgoing_ -> socket        read: socket -> OpenSSL's buffer -> parts
//          gathered  encrypted   one send for kChunkBytes         one recv for kChunkBytes   decrypted
//
// Rules
// - Only TLS 1.3; no session tickets, no resumption, no early data. Names in certificates are not looked at.
// - A session belongs to one thread at a time. It never waits and never raises SIGPIPE.
// - `write` reports bytes only when their ciphertext has left outgoing_ for the kernel. OpenSSL copied the plaintext when it
//   encrypted it, earlier. So "after write reported the last payload byte" is, as on a plain socket, after every byte of the
//   payload was copied, which the torn check of wire.hpp builds on.
// - The sending key is changed every kRekeyBytes: AES-GCM may not encrypt more than 2^24.5 records under one key (RFC 8446,
//   5.5), which a fast connection reaches within minutes, and OpenSSL does not count for us.
// - Memory of a session: at most 2 * kChunkBytes of ciphertext each way.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "openssl.hpp"

namespace kvdir::tls {

constexpr size_t kRecordBytes = 16384;  // RFC 8446, 5.1
constexpr size_t kChunkBytes = 64 << 10;
constexpr uint64_t kRekeyBytes = 1ULL << 37;  // 2^23 full records

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

enum class Side : uint8_t { CLIENT, SERVER };

// Why a call moved nothing.
enum class Pause : uint8_t { WANT_READ, WANT_WRITE, CLOSED };

// Why a session is CLOSED.
enum class Refusal : uint8_t {
    NONE,            // open, or the peer closed it
    NOT_TLS,         // what came is no TLS, or an older version
    NO_CERTIFICATE,  // the peer showed none
    UNTRUSTED,       // the peer's certificate is expired, of another CA, or not meant for this
    BY_PEER,         // the peer refused us
    BROKEN,          // anything else against the protocol
};

class Session {
  public:
    // `fd` is a connected, non-blocking socket that outlives the session. rekey_bytes: other values are for tests.
    Session(std::shared_ptr<const Context> context, Side side, int fd, uint64_t rekey_bytes = kRekeyBytes);
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    // True: done. A server has then verified the client; a client hears of being refused in its first read.
    bool handshake(Pause* why);
    // Bytes moved; 0: `why` says. After a pause of `write` the next call must begin with the same bytes.
    size_t read(const iovec* parts, size_t count, Pause* why);
    size_t write(const iovec* parts, size_t count, Pause* why);
    // Whether a read would find something without the socket becoming readable.
    bool has_pending() const;

    Refusal refusal() const { return refusal_; }
    const std::string& reason() const { return reason_; }  // for people, once CLOSED

  private:
    static int receive(openssl::Bio* bio, char* into, int bytes);
    static int collect(openssl::Bio* bio, const char* from, int bytes);
    static long control(openssl::Bio* bio, int command, long, void*);
    static openssl::BioMethod* method();

    bool flush(Pause* why);
    bool encrypt(const uint8_t* from, size_t bytes);
    bool failed(int result, Pause* why);
    void explain();
    void close(Refusal refusal, std::string reason);

    const openssl::Library& lib_;
    const std::shared_ptr<const Context> context_;
    const int fd_;
    const uint64_t rekey_bytes_;
    openssl::Ssl* ssl_;

    std::vector<uint8_t> outgoing_;  // ciphertext
    size_t sent_ = 0;                // of it
    size_t accepted_ = 0;            // plaintext of outgoing_ that no `write` has reported
    uint64_t key_bytes_ = 0;         // encrypted under the present key
    bool ended_ = false;             // the peer closed, or the socket failed
    int error_ = 0;                  // errno of the socket's failure
    Refusal refusal_ = Refusal::NONE;
    std::string reason_;
};

}  // namespace kvdir::tls

// The client of one encoder service.
import { create } from "@bufbuild/protobuf";
import type { MessageInitShape } from "@bufbuild/protobuf";
import * as grpc from "@grpc/grpc-js";
import { createXXHash3 } from "hash-wasm";
import { ChecksumAlgorithm, ChunkState } from "../generated/epd/encoder/v1/embedding_pb.js";
import type { EmbeddingChunk, EncoderRef, LeaseGrant } from "../generated/epd/encoder/v1/embedding_pb.js";
import {
  EncodeRequestSchema,
  EncoderService,
  FetchRequestSchema,
  GetServerInfoRequestSchema,
  LeaseState,
  ReadOutcome,
  ReleaseRequestSchema,
} from "../generated/epd/encoder/v1/encoder_service_pb.js";
import type { Event, GetServerInfoResponse } from "../generated/epd/encoder/v1/encoder_service_pb.js";
import { CHANNEL_OPTIONS, stream, unary } from "./calls.js";
import type { Connection } from "./calls.js";
import { Embedding } from "./embedding.js";
import { ReadError } from "./errors.js";

/** Targets where only processes of this host answer. */
const LOOPBACK = /^(unix:|(ipv4:)?127(\.\d+){3}:|localhost:|(ipv6:)?\[::1\]:)/;

export interface ClientOptions {
  /** TLS. Left out: plain text. */
  credentials?: grpc.ChannelCredentials;
  /** Proves who calls, to encoders with a file of callers. It goes to every encoder whose chunks are read. */
  token?: string;
  /** Let the token go to other hosts without TLS. */
  tokenInPlainText?: boolean;
  /** The name under which leases are granted to this process. Empty: the caller of `encode`. */
  receiver?: string;
  /** Milliseconds that a read, a release, or a question may take; 30,000 by default. */
  timeoutMs?: number;
}

/** Encodes media, and reads the embeddings in band. */
export class EncoderClient {
  readonly #target: string;
  readonly #credentials: grpc.ChannelCredentials;
  readonly #receiver: string;
  readonly #timeoutMs: number;
  readonly #token: string;
  readonly #tokenAnywhere: boolean;
  readonly #connections = new Map<string, Connection>();
  #instanceId = "";

  /**
   * @param target the gRPC target of the encoder, such as `127.0.0.1:50051`.
   *
   * Calls throw if the token would go to another host in plain text.
   */
  constructor(target: string, options: ClientOptions = {}) {
    this.#target = target;
    this.#credentials = options.credentials ?? grpc.credentials.createInsecure();
    this.#token = options.token ?? "";
    this.#tokenAnywhere = options.credentials !== undefined || (options.tokenInPlainText ?? false);
    this.#receiver = options.receiver ?? "";
    this.#timeoutMs = options.timeoutMs ?? 30_000;
  }

  /**
   * Encodes some or all media items of one prompt, and tells what happens: `accepted`, for each part at most one LAYOUT
   * and exactly one end (READY, `partFailed`, `partCancelled`), then `complete`. Leaving the loop cancels what is not
   * READY. Throws `EncoderError` if the request is refused as a whole.
   *
   * @param request what is not set is as the contract says.
   * @param deadline in milliseconds from now.
   */
  async *encode(
    request: MessageInitShape<typeof EncodeRequestSchema>,
    deadline?: number,
  ): AsyncGenerator<Event, void, undefined> {
    const message = create(EncodeRequestSchema, request);
    const options = deadline === undefined ? {} : { deadline: Date.now() + deadline };
    for await (const response of stream(this.#connection(this.#target), EncoderService.method.encode, message, options)) {
      for (const event of response.events) {
        if (event.event.case === "accepted") this.#instanceId = event.event.value.encoder?.instanceId ?? "";
        yield event;
      }
    }
  }

  /**
   * Reads a READY chunk, also one that another process received: fetches the bytes, checks number and checksum, gives
   * the lease back. Throws `ReadError` if the bytes could not be had, were damaged, or the lease had ended.
   */
  async read(chunk: EmbeddingChunk): Promise<Embedding> {
    const lease = this.#leaseOf(chunk);
    let outcome = ReadOutcome.TRANSPORT_FAILED;
    try {
      const bytes = await this.#fetch(chunk, lease);
      outcome = ReadOutcome.CORRUPT;
      await check(chunk, bytes);
      outcome = ReadOutcome.OK;
      const state = await this.#release(chunk, lease, outcome);
      if (state !== LeaseState.HELD && state !== LeaseState.ALREADY_RELEASED) {
        throw new ReadError(`the lease of part ${chunk.partIdx} ended before the read did: ${LeaseState[state]}`);
      }
      return new Embedding(chunk, bytes);
    } catch (error) {
      if (outcome !== ReadOutcome.OK) await this.#release(chunk, lease, outcome).catch(() => undefined);
      throw error;
    }
  }

  /** Gives back the leases of READY chunks that nobody will read. What cannot be given back runs out by itself. */
  async abandon(chunks: readonly EmbeddingChunk[]): Promise<void> {
    const releases = chunks.map(async (chunk) =>
      this.#release(chunk, this.#leaseOf(chunk), ReadOutcome.ABANDONED).catch(() => undefined),
    );
    await Promise.all(releases);
  }

  /** What the encoder is, can do, and is doing. Throws `EncoderError`. */
  serverInfo(): Promise<GetServerInfoResponse> {
    const request = create(GetServerInfoRequestSchema);
    return unary(this.#connection(this.#target), EncoderService.method.getServerInfo, request, this.#callOptions());
  }

  /** Ends all connections. */
  close(): void {
    for (const { channel } of this.#connections.values()) channel.close();
    this.#connections.clear();
  }

  async #fetch(chunk: EmbeddingChunk, lease: LeaseGrant): Promise<Uint8Array> {
    const bytes = new Uint8Array(Number(chunk.nbytes));
    let position = 0;
    const request = create(FetchRequestSchema, { leaseId: lease.leaseId });
    const connection = this.#connectionOf(chunk.encoder);
    for await (const piece of stream(connection, EncoderService.method.fetch, request, this.#callOptions())) {
      if (position + piece.data.length > bytes.length) {
        throw new ReadError(`more than ${bytes.length} bytes came of part ${chunk.partIdx}`);
      }
      bytes.set(piece.data, position);
      position += piece.data.length;
    }
    if (position !== bytes.length) {
      throw new ReadError(`${position} of ${bytes.length} bytes came of part ${chunk.partIdx}`);
    }
    return bytes;
  }

  async #release(chunk: EmbeddingChunk, lease: LeaseGrant, outcome: ReadOutcome): Promise<LeaseState> {
    const request = create(ReleaseRequestSchema, { leases: [{ leaseId: lease.leaseId, outcome }] });
    const connection = this.#connectionOf(chunk.encoder);
    const answer = await unary(connection, EncoderService.method.release, request, this.#callOptions());
    return answer.leases[0]?.state ?? LeaseState.UNSPECIFIED;
  }

  #leaseOf(chunk: EmbeddingChunk): LeaseGrant {
    const lease = chunk.leases.find((candidate) => candidate.receiverId === this.#receiver);
    if (chunk.state !== ChunkState.READY || !lease) {
      throw new ReadError(`part ${chunk.partIdx} is not READY, or has no lease for this receiver`);
    }
    return lease;
  }

  // A server is its instance_id, whatever address it tells others.
  #connectionOf(encoder: EncoderRef | undefined): Connection {
    const own = !encoder?.grpcTarget || encoder.instanceId === this.#instanceId;
    return this.#connection(own ? this.#target : encoder.grpcTarget);
  }

  #connection(target: string): Connection {
    let connection = this.#connections.get(target);
    if (!connection) {
      const metadata = this.#metadata(target);
      connection = { channel: new grpc.Client(target, this.#credentials, CHANNEL_OPTIONS), metadata };
      this.#connections.set(target, connection);
    }
    return connection;
  }

  #metadata(target: string): grpc.Metadata {
    const metadata = new grpc.Metadata();
    if (!this.#token) return metadata;
    if (!this.#tokenAnywhere && !LOOPBACK.test(target)) {
      throw new Error(
        `the token would go to ${target} in plain text; give credentials for TLS, or tokenInPlainText if the network is trusted`,
      );
    }
    metadata.set("authorization", `Bearer ${this.#token}`);
    return metadata;
  }

  #callOptions(): grpc.CallOptions {
    return { deadline: Date.now() + this.#timeoutMs };
  }
}

async function check(chunk: EmbeddingChunk, bytes: Uint8Array): Promise<void> {
  const { algorithm, value } = chunk.checksum ?? { algorithm: ChecksumAlgorithm.UNSPECIFIED, value: 0n };
  if (algorithm !== ChecksumAlgorithm.XXH3_64) {
    throw new ReadError(`part ${chunk.partIdx} has a checksum of a kind that this client does not know`);
  }
  const hash = await createXXHash3();
  if (BigInt(`0x${hash.init().update(bytes).digest("hex")}`) !== value) {
    throw new ReadError(`the bytes of part ${chunk.partIdx} do not have its checksum`);
  }
}

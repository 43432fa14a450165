// What can go wrong: the encoder says no, or what came must not be used.
import { fromBinary } from "@bufbuild/protobuf";
import { anyUnpack } from "@bufbuild/protobuf/wkt";
import * as grpc from "@grpc/grpc-js";
import { ErrorInfoSchema, RetryInfoSchema } from "../generated/google/rpc/error_details_pb.js";
import { StatusSchema } from "../generated/google/rpc/status_pb.js";
import type { Status } from "../generated/google/rpc/status_pb.js";

const DETAILS = "grpc-status-details-bin";

/** The encoder refused a call or failed a part, or the call failed on its way. */
export class EncoderError extends Error {
  constructor(
    /** The gRPC status code. */
    readonly code: grpc.status,
    message: string,
    /** `ErrorInfo.reason`, such as `ADMISSION_FULL`; empty if the encoder was not reached. */
    readonly reason: string = "",
    /** Milliseconds after which another try can succeed; undefined if a retry alone does not help. */
    readonly retryAfterMs?: number,
  ) {
    super(`${grpc.status[code]}${reason && ` (${reason})`}: ${message}`);
    this.name = "EncoderError";
  }
}

/** The bytes of an embedding could not be had, or must not be used. */
export class ReadError extends Error {
  override readonly name = "ReadError";
}

/** Decodes a `google.rpc.Status`; details of unknown types are left out. */
export function errorOfStatus(status: Status): EncoderError {
  let reason = "";
  let retryAfterMs: number | undefined;
  for (const detail of status.details) {
    const info = anyUnpack(detail, ErrorInfoSchema);
    const retry = anyUnpack(detail, RetryInfoSchema);
    if (info) reason = info.reason;
    if (retry?.retryDelay) retryAfterMs = Number(retry.retryDelay.seconds) * 1e3 + retry.retryDelay.nanos / 1e6;
  }
  return new EncoderError(status.code, status.message, reason, retryAfterMs);
}

/** Decodes what gRPC throws: its trailing metadata hold a `google.rpc.Status` if the encoder made the error. */
export function errorOf(error: unknown): unknown {
  if (!(error instanceof Error) || !("code" in error) || typeof error.code !== "number") return error;
  const failure = error as grpc.ServiceError;
  for (const value of failure.metadata?.get(DETAILS) ?? []) {
    if (Buffer.isBuffer(value)) {
      const status = fromBinary(StatusSchema, value);
      if (status.code === failure.code) return errorOfStatus(status);
    }
  }
  return new EncoderError(failure.code, failure.details || failure.message);
}

export { EncoderClient } from "./client.js";
export type { ClientOptions } from "./client.js";
export { Embedding } from "./embedding.js";
export type { Rows } from "./embedding.js";
export { EncoderError, ReadError, errorOfStatus } from "./errors.js";
export * from "../generated/epd/encoder/v1/embedding_pb.js";
export * from "../generated/epd/encoder/v1/encoder_service_pb.js";
export * from "../generated/epd/encoder/v1/media_pb.js";

// GatherRows for CANN: tiling, shapes, definition.
#include "gather_rows_tiling.h"
#include "rows_cann.h"

namespace optiling {

static ge::graphStatus GatherRowsTilingFunc(gert::TilingContext* context) {
  const gert::Shape& x = turbogr::InputShape(context, 0);
  const int64_t count = turbogr::InputShape(context, 1).GetShapeSize();
  const turbogr::GatherRowsProblem problem = {count, turbogr::Width(x, 1), turbogr::InputBytes(context, 0),
                                              turbogr::VectorCores(context)};
  return turbogr::SetLaunch<turbogr::GatherRowsTiling>(context, problem);
}

}  // namespace optiling

namespace ge {

static graphStatus GatherRowsInferShape(gert::InferShapeContext* context) {
  const gert::Shape* x = context->GetInputShape(0);
  const gert::Shape* rows = context->GetInputShape(1);
  gert::Shape* y = context->GetOutputShape(0);
  *y = *x;
  y->SetDim(0, rows->GetDim(0));
  return ge::GRAPH_SUCCESS;
}

static graphStatus GatherRowsInferDataType(gert::InferDataTypeContext* context) {
  return context->SetOutputDataType(0, context->GetInputDataType(0));
}

}  // namespace ge

namespace ops {

class GatherRows : public OpDef {
 public:
  explicit GatherRows(const char* name) : OpDef(name) {
    this->Input("x")
        .ParamType(REQUIRED)
        .DataType({ge::DT_FLOAT16, ge::DT_FLOAT16, ge::DT_BF16, ge::DT_BF16, ge::DT_FLOAT, ge::DT_FLOAT})
        .Format({ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND});
    this->Input("rows")
        .ParamType(REQUIRED)
        .DataType({ge::DT_INT32, ge::DT_INT64, ge::DT_INT32, ge::DT_INT64, ge::DT_INT32, ge::DT_INT64})
        .Format({ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND});
    this->Output("y")
        .ParamType(REQUIRED)
        .DataType({ge::DT_FLOAT16, ge::DT_FLOAT16, ge::DT_BF16, ge::DT_BF16, ge::DT_FLOAT, ge::DT_FLOAT})
        .Format({ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND});
    this->SetInferShape(ge::GatherRowsInferShape);
    this->SetInferDataType(ge::GatherRowsInferDataType);
    this->AICore().SetTiling(optiling::GatherRowsTilingFunc);
    this->AICore().AddConfig("ascend910b");
    this->AICore().AddConfig("ascend910_93");
  }
};

OP_ADD(GatherRows);

}  // namespace ops
